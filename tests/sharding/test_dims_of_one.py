"""Marks on dims of one element, or of none: one device holds it, others nothing, and all numbers are the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax import annotate_sharding
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.errors import DistIRError
from distir_relax.interpret import execute
from distir_relax.ir import parse

MESHES = {"3": dr.DeviceMesh((3,), ("tp",)), "2x3": dr.DeviceMesh((2, 3), ("dp", "tp"))}


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


Mark = Callable[..., torch.Tensor]
CASES: dict[str, tuple[Callable[[Mark], Callable[..., torch.Tensor]], list[tuple[int, ...]]]] = {
    "pointwise": (lambda a: lambda x: torch.relu(a(x)) * 2, [(1, 5)]),
    "rows": (lambda a: lambda x, w: a(x) @ w, [(1, 5), (5, 4)]),
    "reduced": (lambda a: lambda x, w: a(x, 1) @ w, [(4, 1), (1, 5)]),
    "columns": (lambda a: lambda x, w: x @ a(w, 1), [(4, 5), (5, 1)]),
    "sum": (lambda a: lambda x: a(x).sum(0), [(1, 5)]),
    "mean": (lambda a: lambda x: a(x).mean(0, keepdim=True), [(1, 5)]),
    "broadcast": (lambda a: lambda x, y: a(x) + y, [(1, 5), (7, 5)]),
    "beside a split": (lambda a: lambda x, y: a(x) + a(y), [(1, 5), (7, 5)]),
    "softmax": (lambda a: lambda x: torch.softmax(a(x), 0), [(1, 5)]),
    "reshape": (lambda a: lambda x: a(x).reshape(5), [(1, 5)]),
    "cat": (lambda a: lambda x, y: torch.cat([a(x), y]), [(1, 5), (4, 5)]),
    "expand": (lambda a: lambda x: a(x).expand(7, 5) * 2, [(1, 5)]),
    "slice": (lambda a: lambda x: a(x)[:1], [(1, 5)]),
    "convolution": (lambda a: lambda x, w: torch.conv1d(a(x, 2), w, padding=1), [(2, 3, 1), (4, 3, 3)]),
    "an inner value": (lambda a: lambda x: a(x.sum(0, keepdim=True)) * x, [(7, 5)]),
    "given": (lambda a: lambda x: a(x), [(1, 5)]),
    "empty": (lambda a: lambda x: a(x) * 2, [(0, 5)]),
    "empty, summed": (lambda a: lambda x: a(x).sum(0), [(0, 5)]),
}


@pytest.mark.drawn(24)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_model(case: str, mesh: str, tail: str) -> None:
    make, shapes = CASES[case]
    inputs = tuple(torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes)
    front = "" if mesh == "3" else "R, "

    def mark(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return annotate_sharding(x, MESHES[mesh], f"{front}S[{dim}]")

    expected = make(lambda x, dim=0: x)(*inputs)
    plan = dr.compile(Model(make(mark)), inputs, tail=tail)
    torch.testing.assert_close(plan(*inputs), expected)
    names = [item.value.name for item in plan.modules["sharded"].main.inputs]
    found = execute(plan.modules["sharded"], plan.modules["distributed"], dict(zip(names, inputs, strict=True)))
    torch.testing.assert_close(next(iter(found.values())), expected)


@pytest.mark.parametrize(
    ("placement", "held", "size"),
    [
        ("S[0]", [1, 0, 0], 1),
        ("S[0: 0|1|0]", [0, 1, 0], 1),
        ("S[0: chunk]", [1, 0, 0], 1),
        ("S[0: 0|0|0]", [0, 0, 0], 0),
    ],
)
def test_one_device_holds_it(placement: str, held: list[int], size: int) -> None:
    weight = torch.randn(size, 5)
    x = torch.randn(4, 5)
    model = torch.nn.Linear(5, size, bias=False)
    model.weight = torch.nn.Parameter(weight)
    plan = dr.compile(model, (x,), mesh=3, shardings={"weight": placement})
    (kind,) = [i.value.placed for i in plan.modules["distributed"].main.inputs if i.role == "parameter"]
    assert [kind.local(rank).shape[0] for rank in range(3)] == held
    torch.testing.assert_close(plan(x), x @ weight.T)


def test_both_axes_may_split_it() -> None:
    model = torch.nn.Linear(5, 1)
    x = torch.randn(4, 5)
    plan = dr.compile(model, (x,), mesh=(2, 3), shardings={"weight": "S[0], S[0]"})
    torch.testing.assert_close(plan(x), model(x))


def test_a_stage_of_a_pipeline_is_no_mark() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(DistIRError, match=r"At\[0\] keeps a tensor on one pipeline stage, which an annotation"):
        dr.compile(Model(lambda y: annotate_sharding(y, MESHES["3"], "At[0]") * 2), (x,))
    with pytest.raises(DistIRError, match=r"weight: At\[0\] keeps a tensor on one pipeline stage"):
        dr.compile(torch.nn.Linear(5, 7), (x,), mesh=3, shardings={"weight": "At[0]"})
    text = """module @global {
  mesh[0] = device_mesh((3,), ("tp",))
  func @main(input %x: f32[3,5]) {
    %y: f32[3,5] = annotate_sharding(%x) {placements="At[0]"}  # model.py:7
    return "y": %y
  }
}"""
    module: Any = parse(text)
    with pytest.raises(DistIRError, match=r"model.py:7: At\[0\] keeps a tensor on one pipeline stage"):
        run_passes(module, compile_passes())
