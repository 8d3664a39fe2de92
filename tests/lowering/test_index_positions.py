"""Masks and positions as functions of their indices, against torch: those of models, and drawn ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distir_relax.frontends.dynamic_shapes import Dim
from distir_relax.frontends.torch import import_torch
from distir_relax.interpret import interpret
from distir_relax.ir import Module, verify
from distir_relax.ir.symbols import specialize
from distir_relax.kernels.positions import indexed
from distir_relax.lowering import IndexPositions
from distir_relax.ops import check, lookup

Positions = Callable[[int, int], torch.Tensor]


class OfSizes(nn.Module):
    """What a function makes of the numbers of new positions and of those before."""

    def __init__(self, function: Positions) -> None:
        super().__init__()
        self.function = function

    def forward(self, new: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        return self.function(new.shape[0], past.shape[0])


def imported(function: Positions) -> tuple[Module, Module]:
    """The program of a function, and the same by the pass."""
    shapes = {"new": {0: Dim("new", max=40)}, "past": {0: Dim("past", max=80)}}
    module = import_torch(OfSizes(function), (torch.zeros(5), torch.zeros(13)), dynamic_shapes=shapes).module
    changed = IndexPositions().run(module)
    verify(changed, check)
    return module, changed


def computed(module: Module, new: int, past: int) -> torch.Tensor:
    at = specialize(module, {"new": new, "past": past})
    inputs = {i.value.name: torch.zeros(i.value.tensor.shape) for i in at.main.inputs}
    (result,) = interpret(at, inputs).values()
    return result


SIZES = [(2, 1), (1, 9), (5, 3), (7, 24)]


def rows(new: int, past: int) -> torch.Tensor:
    return torch.arange(past, past + new)[:, None]


def columns(new: int, past: int) -> torch.Tensor:
    return torch.arange(past + new)


def segments(new: int, past: int) -> torch.Tensor:
    """Documents as transformers finds them: where positions do not go on by one, a new one begins."""
    positions = columns(new, past)[None].expand(3, -1)
    first = torch.cat([positions[:, :1] - 1, positions], 1)
    document = (first[:, 1:] - first[:, :-1] != 1).cumsum(1)
    batch, row, column = torch.arange(3)[:, None, None], rows(new, past)[None], columns(new, past)[None, None]
    same = document[batch, row] == document[batch, column]
    return torch.ones((), dtype=torch.bool) & same & (positions[batch, column] <= positions[batch, row])


MASKS: list[tuple[Positions, str]] = [
    (lambda n, past: columns(n, past) <= rows(n, past), "i1 <= i0 + past"),
    (lambda n, past: (columns(n, past)[:, None] > columns(n, past)).T[None], "i1 + 1 <= i2"),
    (lambda n, past: torch.ones(n, n, dtype=torch.bool).tril(), "i1 <= i0"),
    (lambda n, past: torch.ones(n, n, dtype=torch.bool).triu(2), "i0 + 2 <= i1"),
    (lambda n, past: ~torch.ones(n, n, dtype=torch.bool).tril(-1), "i0 <= i1"),
    (
        lambda n, past: (columns(n, past) <= rows(n, past)) & (rows(n, past) - columns(n, past) < 4),
        "i0 + past <= i1 + 3 and i1 <= i0 + past",
    ),
    (lambda n, past: (columns(n, past) <= rows(n, past)) | (columns(n, past) < 3), "i1 <= 2 or i1 <= i0 + past"),
    (lambda n, past: rows(n, 0) // 8 == columns(n, 0) // 8, "i0 // 8 == i1 // 8"),
    (lambda n, past: (rows(n, 0) - columns(n, 0)) % 3 != 0, ""),
    (lambda n, past: (columns(n, 0) < n)[None] & (columns(n, 0)[:, None] >= 0), "True"),
    (lambda n, past: torch.cat([torch.arange(n) < n, columns(n, past) > 3]), ""),
    (lambda n, past: torch.where(torch.arange(n) > 3, torch.arange(n) < 6, torch.arange(n) == 0), ""),
    (segments, "i2 <= i1 + past"),
    (lambda n, past: torch.arange(past, past + n)[None].expand(4, -1) * 2 + 1, "2*i1 + 2*past + 1"),
    (lambda n, past: torch.minimum(torch.arange(n), torch.tensor(7)), "min(7, i0)"),
    (lambda n, past: torch.ones(n, dtype=torch.int64).cumsum(0) - 1, "i0"),
]


@pytest.mark.parametrize("number", range(len(MASKS)))
def test_what_models_compute_is_one_op(number: int) -> None:
    function, value = MASKS[number]
    module, changed = imported(function)
    assert [op.name for op in changed.main.ops] == ["indexed"]
    if value:
        assert changed.main.ops[0].attrs["value"] == value
    for new, past in SIZES:
        expected, found = function(new, past), computed(changed, new, past)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert torch.equal(computed(module, new, past), expected)


def test_other_values_stay_as_they_are() -> None:
    """Numbers that depend on data, that are no whole numbers, that one op computes, or that differ between parts."""
    for function in (
        lambda n, past: torch.arange(n),
        lambda n, past: torch.cat([torch.arange(n), torch.arange(past) * 2]),
        lambda n, past: torch.arange(n) / 2,
        lambda n, past: torch.arange(2 * n).reshape(n, 2),
        lambda n, past: torch.where(torch.arange(n) > 3, torch.arange(n), 2 - torch.arange(n)),
    ):
        _, changed = imported(function)
        results = {v.name: op for op in changed.main.ops for v in op.results}
        assert results[changed.main.outputs[0].value.name].name != "indexed"
        for new, past in SIZES:
            assert torch.equal(computed(changed, new, past), function(new, past))


def drawn(seed: int) -> Positions:
    """Some ops on numbers of positions, and on their comparisons; all sizes are those of a matrix."""
    choose = random.Random(seed)
    steps = [(choose.randrange(1000), choose.randrange(1000), choose.randrange(14)) for _ in range(9)]
    constants = [choose.randrange(-4, 9) for _ in steps]

    def function(new: int, past: int) -> torch.Tensor:
        whole = (new, past + new)
        numbers = [rows(new, past).expand(whole), (columns(new, past) + 3).expand(whole)]
        truths = [numbers[0] < numbers[1]]
        for (a, b, kind), constant in zip(steps, constants, strict=True):
            x, y = numbers[a % len(numbers)], numbers[b % len(numbers)]
            p, q = truths[a % len(truths)], truths[b % len(truths)]
            more: list[Any] = [
                x + y, x - y, constant * x, x + constant, (x - y) // 3, x % 5, torch.maximum(x, y), x.flip(1)
            ]  # fmt: skip
            tests: list[Any] = [x <= y, x > constant, p & q, p | ~q, x == y, torch.where(p, q, ~q)]
            (numbers if kind < len(more) else truths).append([*more, *tests][kind])
        return torch.cat([truths[-1], numbers[-1] < 3])[1:, : past + 2]

    return function


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_functions(seed: int) -> None:
    function = drawn(seed)
    _, changed = imported(function)
    for new, past in ((2, 1), (7, 24)):
        assert torch.equal(computed(changed, new, past), function(new, past))


def test_elements_of_no_index_take_no_memory() -> None:
    found = indexed("i2 <= i1 + n", ("n",), (3,), (5, 2, 7), torch.bool, "cpu")
    assert found.stride() == (0, 7, 1)
    assert torch.equal(found[4], torch.ones(2, 7, dtype=torch.bool).tril(3))
    assert indexed("True", (), (), (3, 0), torch.bool, "cpu").shape == (3, 0)
    assert torch.equal(indexed("max(i0, 2)", (), (), (4,), torch.int64, "cpu"), torch.tensor([2, 2, 2, 3]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("().__class__", "expected an expression of indices"), ("i0.real", "expected an expression of indices"),
        ("__import__('os')", "expected an expression of indices"), ("(lambda: 0)()", "expected an expression of ind"),
        ("9 ** 9", "expected an expression of indices"), ("[i0][0]", "expected an expression of indices"),
        ("i0 <= i1 <= 3", "expected an expression of indices"), ("i0 if i1 else 3", "expected an expression"),
        ("1.5", "expected an expression of indices"), ("'a'", "expected an expression of indices"),
        ("min(i0)", "expected an expression of indices"), ("i0 <", "expected an expression of indices"),
        ("(" * 999 + "i0" + ")" * 999, "expected an expression of indices"), ("i0 + " * 999 + "i0", "4,000 characters"),
        (5, "no text"), ("i2", "an index below i2"), ("m", "a name among"), ("i٣", "an index below i2"),
        ("comm", "a name among"),
    ],
)  # fmt: skip
def test_a_program_has_no_other_expressions(value: Any, message: str) -> None:
    """A bundle's text is data, whoever has written it."""
    attrs = {"value": value, "names": ("n",), "sizes": (3,), "shape": (2, 5), "dtype": "bool"}
    with pytest.raises(ValueError, match=message):
        lookup("indexed").semantics.infer([], attrs)


def test_sizes_that_are_called_like_an_index_stay() -> None:
    model = OfSizes(lambda new, past: columns(new, past) <= rows(new, past) + 1)
    module = import_torch(
        model, (torch.zeros(5), torch.zeros(13)),
        dynamic_shapes={"new": {0: Dim("i0", max=40)}, "past": {0: Dim("past", max=80)}},
    ).module  # fmt: skip
    assert IndexPositions().run(module) is module
