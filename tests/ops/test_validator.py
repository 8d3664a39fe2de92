"""Every op, sharded in every way that its operands can lie, computes what it computes whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pieces import Pieces, difference
from samples import SAMPLES, of
from validator import GRID, MESHES, Case, Setting, combinations, validate, validated

from distir_relax.layout import DeviceMesh, Partial, Replicate
from distir_relax.lowering import redistribute
from distir_relax.ops import OpDef, parse_rule
from distir_relax.sharding import Propagate


@pytest.mark.drawn(105)
@pytest.mark.parametrize("mesh", [*MESHES, GRID], ids=lambda mesh: "x".join(map(str, mesh.shape)))
@pytest.mark.parametrize(("name", "number"), validated())
def test_no_combination_of_placements_is_wrong(name: str, number: int, mesh: DeviceMesh) -> None:
    """A draw of the combinations; `tests/ops/validator.py` runs all of them."""
    wrong, _ = validate(name, number, mesh, most=4)
    assert not wrong, "\n".join(map(str, wrong))


def test_a_wrong_rule_is_found(change: Callable[..., OpDef]) -> None:
    """A softmax whose dim may be split, a product that is a maximum, a square that is linear."""
    change("nn.softmax", split={"rule": "a b c -> a b c"})
    assert validate("nn.softmax", 0, MESHES[0])[0]
    change("matmul", split={"rule": lambda types, attrs, results: parse_rule(
        "m k, k n -> m n", [t.shape for t in types], [t.shape for t in results], reduce="max")})  # fmt: skip
    assert validate("matmul", 0, MESHES[0])[0]
    change("square", semantics={"linear": (frozenset({0}),)})
    assert validate("square", 0, MESHES[1])[0]


def test_a_missing_rule_is_listed(change: Callable[..., OpDef]) -> None:
    """An op that could run on the shards as they are, if its rule said so."""
    sample = "negative"
    assert not validate(sample, 0, MESHES[0])[1]
    change(sample, semantics={"linear": ()}, split={"rule": "[a] b -> [a] b"})
    _, missing = validate(sample, 0, MESHES[0])
    assert {finding.layouts for finding in missing} == {(("S[0]",),), (("S[0: chunk]",),), (("I[sum]",),)}


def test_terms_are_unlike() -> None:
    """A pending sum whose terms are equal would let a wrong rule pass."""
    case = Case(Setting("nn.relu", of("f64[4,6]"), MESHES[1]), (("I[sum]",),))
    terms = case.data["x0"]
    assert len({float(term.sum()) for term in terms}) == 3
    assert float((terms.sum(0) - case.operands[0]).abs().max()) < 1e-12


def wrong_by_pieces(name: str, number: int) -> set[tuple[tuple[str, ...], ...]]:
    """The combinations on 2x3 devices that are wrong, found piece by piece."""
    pieces = Pieces(Setting(name, SAMPLES[name][number], GRID))
    return {layouts for layouts in combinations(SAMPLES[name][number], GRID) if pieces.wrong(layouts)}


@pytest.mark.parametrize("name", ["nn.softmax", "cumsum", "divide"])
def test_no_combination_is_wrong_piece_by_piece(name: str) -> None:
    """`make validate` does this for all ops."""
    assert not wrong_by_pieces(name, 0)


def test_pieces_find_what_whole_programs_find(change: Callable[..., OpDef]) -> None:
    """With a softmax whose dim may be split."""
    change("nn.softmax", split={"rule": "a b c -> a b c"})
    whole = {finding.layouts for finding in validate("nn.softmax", 0, GRID)[0]}
    assert whole
    assert wrong_by_pieces("nn.softmax", 0) == whole


def test_pieces_find_a_wrong_move_that_the_op_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of a sum of which the largest is taken are as little a NaN as the sum is."""
    monkeypatch.setitem(
        redistribute._STEPS, (Partial, Replicate),
        lambda move, value, step: move.builder.one("all_reduce", value, axis=move.axis(step), op="max"),
    )  # fmt: skip
    assert not validate("isnan", 0, GRID)[0]
    assert (("I[sum]", "R"),) in wrong_by_pieces("isnan", 0)


def test_an_input_that_does_not_lie_as_annotated_is_found() -> None:
    setting = Setting("negative", SAMPLES["negative"][0], GRID)
    program, other = (setting.module(((first, "R"),)) for first in ("S[0]", "S[1]"))
    sharded = Propagate().run(program)
    assert not difference(program, sharded)
    assert "annotated S[1], R" in difference(other, sharded)
