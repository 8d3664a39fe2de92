"""Results in the memory of operands: which ops may do it, and that they compute the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samples import SAMPLES, draw

from distir_relax.ir import Function, Op, TensorType, Value, parse
from distir_relax.ops import Overwriting, Trait, entries, evaluate, infer, lookup, reused_operands, torch_kernel

REUSING = [entry.name for entry in entries() if entry.kernel(Overwriting) is not None]
CASES = [(name, i) for name, samples in SAMPLES.items() for i in range(len(samples))]


def instance(name: str, number: int) -> tuple[Op, list[torch.Tensor]]:
    sample = SAMPLES[name][number]
    operands = [draw(text, torch.Generator().manual_seed(0)) for text in sample.operands]
    kinds = [TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in operands]
    values = tuple(Value(f"x{i}", kind) for i, kind in enumerate(kinds))
    results = tuple(Value(f"y{i}", kind) for i, kind in enumerate(infer(name, kinds, sample.attrs)))
    return Op(name, values, results, sample.attrs), operands


def test_the_ops_of_arithmetic_can_reuse_operands() -> None:
    assert {"add", "subtract", "multiply", "divide", "negative", "exp", "tanh", "scatter_elements"} <= set(REUSING)
    assert {"where", "isnan", "equal", "floor_divide", "nn.gelu"}.isdisjoint(REUSING)


@pytest.mark.parametrize(("name", "number"), [case for case in CASES if case[0] in REUSING])
def test_the_result_in_an_operand_is_the_result(name: str, number: int) -> None:
    op, operands = instance(name, number)
    expected = evaluate(op, operands)[0]
    kernel = lookup(name).kernel(Overwriting)
    assert kernel is not None
    allowed = kernel.operands
    for i, value in enumerate(op.operands):
        if value.type == op.results[0].type and (allowed is None or i in allowed):
            given = [x.clone() for x in operands]
            names = [f"x{n}" for n in range(len(given))]
            code = torch_kernel(replace(op, attrs={**op.attrs, "by": "overwriting", "into": i}), names)
            found = eval(code, {"torch": torch, "F": F, **dict(zip(names, given, strict=True))})
            assert found.data_ptr() == given[i].data_ptr(), code
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            for n, (x, original) in enumerate(zip(given, operands, strict=True)):
                assert n == i or torch.equal(x, original)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_result_has_memory_of_its_own_unless_its_entry_says_so(name: str, number: int) -> None:
    op, operands = instance(name, number)
    entry = lookup(name)
    other = {Trait.ON_COMMUNICATOR, Trait.MAY_SHARE, Trait.KEEPS, Trait.ANNOTATION, Trait.REDISTRIBUTION}
    if other & entry.traits or entry.shares_storage or entry.is_identity(op.operands, op.results):
        return
    results = [y for y in evaluate(op, operands) if y.numel()]
    places = [y.untyped_storage().data_ptr() for y in results]
    assert len(set(places)) == len(places)
    assert set(places).isdisjoint(x.untyped_storage().data_ptr() for x in operands)
    # No element stands for several.
    for y in results:
        steps = [(step, size) for step, size in zip(y.stride(), y.shape, strict=True) if size > 1]
        assert all(step for step, _ in steps)
        assert math.prod(size for _, size in steps) == y.numel()


def reused(body: str, kept: tuple[str, ...] = (), output: str = "out") -> dict[str, int]:
    """What `reused_operands` finds in lines ``name = op(operands)`` of f32[8,16] tensors, and other types given."""
    lines = []
    for line in body.strip().splitlines():
        name, code = (part.strip() for part in line.split("=", 1))
        name, _, kind = name.partition(":")
        lines.append(f"    %{name}: {kind.strip() or 'f32[8,16]'} = {code}")
    text = "\n".join(
        [
            "module @ranked {",
            '  mesh[0] = device_mesh((2,), ("tp",))',
            "  ranks = (@main, @main)",
            "  func @main(input %x: f32[8,16], input %row: f32[16]) {",
            *lines,
            f'    return "y": %{output}',
            "  }",
            "}",
        ]
    )
    function: Function = parse(text).main
    return reused_operands(function, kept)


def test_the_last_reader_of_a_value_takes_its_memory() -> None:
    assert reused("a = exp(%x)\nb = tanh(%a)\nout = add(%row, %b)") == {"b": 0, "out": 1}


def test_inputs_and_kept_values_stay() -> None:
    assert reused("out = exp(%x)") == {}
    assert reused("a = exp(%x)\nout = tanh(%a)", kept=("a",)) == {}


def test_a_value_with_another_reader_stays() -> None:
    assert reused("a = exp(%x)\nb = tanh(%a)\nout = add(%a, %b)") == {"out": 0}
    assert reused("a = exp(%x)\nb = tanh(%a)", output="a") == {}


def test_a_value_that_is_seen_through_a_view_stays() -> None:
    view = "v: f32[16,8] = reshape(%a) {shape=(16, 8)}"
    assert reused(f"a = exp(%x)\n{view}\nb = tanh(%a)\nw: f32[16,8] = exp(%v)\nu = reshape(%w) {{shape=(8, 16)}}\n"
                  "out = add(%b, %u)") == {"w": 0, "out": 0}  # fmt: skip
    # `b` cannot take the memory of `a`, which `v` reads later; `w` can.


def test_a_view_of_the_whole_is_as_good_and_a_part_is_not() -> None:
    view = "v: f32[16,8] = reshape(%a) {shape=(16, 8)}"
    assert reused(f"a = exp(%x)\n{view}\nw: f32[16,8] = exp(%v)\nout = reshape(%w) {{shape=(8, 16)}}") == {"w": 0}
    part = "v: f32[4,16] = strided_slice(%a) {axes=(0,), begin=(0,), end=(4,), strides=(1,)}"
    assert reused(f"a = exp(%x)\n{part}\nout: f32[4,16] = exp(%v)") == {}
    wide = "v = broadcast_to(%a) {shape=(8, 16)}"
    assert reused(f"a: f32[16] = exp(%row)\n{wide}\nout = exp(%v)") == {}


def test_two_views_of_one_operand_are_not_overwritten() -> None:
    turned = "t: f32[16,8] = permute_dims(%a) {axes=(1, 0)}\nu = reshape(%t) {shape=(8, 16)}"
    assert reused(f"a = exp(%x)\n{turned}\nout = add(%a, %u)") == {}
    assert reused("a = exp(%x)\nout = multiply(%a, %a)") == {"out": 0}


def test_what_other_ranks_get_stays() -> None:
    sums = 's = all_reduce(%a) {axis="tp", op="sum", step=0}'
    assert reused(f"a = exp(%x)\n{sums}\nb = tanh(%a)\nout = add(%s, %b)") == {"out": 0}
    gathered = 's: f32[16,16] = all_gather(%a) {axis="tp", dim=0, sizes=(8, 8), step=0}'
    assert reused(f"a = exp(%x)\n{gathered}\nout: f32[16,16] = exp(%s)") == {}


def test_scatters_overwrite_their_data_only() -> None:
    ids = 'i: i64[8,16] = astype(%x) {dtype="int64"}'
    code = 'out = scatter_elements(%a, %i, %b) {axis=1, reduction="add"}'
    assert reused(f"{ids}\na = exp(%x)\nb = tanh(%x)\n{code}") == {"out": 0}
    assert reused(f"{ids}\nb = tanh(%x)\n{code.replace('%a', '%x')}") == {}
    assert reused(f"{ids}\nb = tanh(%x)\n{code.replace('%a', '%b')}") == {}


def test_memory_in_another_order_is_taken_only_by_the_operand_that_decides_it() -> None:
    turned = "t: f32[16,8] = permute_dims(%a) {axes=(1, 0)}"
    assert reused(f"a = exp(%x)\n{turned}\nb: f32[16,8] = linear(%row1, %row2)\nout: f32[16,8] = add(%b, %t)".replace(
        "linear(%row1, %row2)", "reshape(%x) {shape=(16, 8)}")) == {}  # fmt: skip
    assert reused(f"a = exp(%x)\n{turned}\nout: f32[16,8] = tanh(%t)") == {"out": 0}
    assert reused(f"r: f32[16,8] = reshape(%x) {{shape=(16, 8)}}\nb = exp(%x)\na = exp(%b)\n{turned}\n"
                  "c: f32[16,8] = exp(%r)\nout: f32[16,8] = add(%c, %t)") == {"a": 0, "out": 0}  # fmt: skip
