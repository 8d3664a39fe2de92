"""Gradients of single ops: programs of an op and its backward step, and what torch's autograd says of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distir_relax.autodiff import gradients
from distir_relax.ir import Function, Module, Op, TensorType
from distir_relax.ops import NO_GRADIENT, Builder, evaluate, lookup

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from samples import SAMPLES, Sample, draw


@dataclass(frozen=True)
class Case:
    """The backward program of one sample: it takes the op's operands and the gradients of its results.

    Outputs are the gradients of the operands `wanted`, in order.
    """

    name: str
    number: int
    module: Module
    wanted: tuple[int, ...]
    operands: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor, ...]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        names = [item.value.name for item in self.module.main.inputs]
        return dict(zip(names, (*self.operands, *self.seeds), strict=True))


def differentiable() -> list[tuple[str, int]]:
    """The samples of ops whose entries say a gradient."""
    return [
        (name, number)
        for name, samples in SAMPLES.items()
        for number, sample in enumerate(samples)
        if lookup(name).computes
        and lookup(name).gradient not in (None, NO_GRADIENT)
        and wanted_of(sample)
        and case(name, number).wanted
    ]


def wanted_of(sample: Sample) -> tuple[int, ...]:
    """The operands of a sample that are floats."""
    return tuple(i for i, text in enumerate(sample.operands) if text.startswith(("f64", "f32")))


def case(name: str, number: int, seed: int = 0) -> Case:
    """The backward program of a sample, and its data."""
    sample = SAMPLES[name][number]
    generator = torch.Generator().manual_seed(seed)
    operands = tuple(draw(text, generator) for text in sample.operands)
    g = Builder()
    values = [g.input(f"x{i}", kind_of(tensor)) for i, tensor in enumerate(operands)]
    made = g.emit(name, *values, **sample.attrs)
    results = made if isinstance(made, tuple) else (made,)
    ops = tuple(g.ops)
    floats = [v for v in results if "float" in v.tensor.dtype]
    seeds = tuple(
        torch.randn(v.tensor.shape, generator=generator, dtype=getattr(torch, v.tensor.dtype)) for v in floats
    )
    given = {v.name: g.input(f"g{i}", v.tensor) for i, v in enumerate(floats)}
    asked = [f"x{i}" for i in wanted_of(sample)]
    found = gradients(g, ops, given, asked)
    wanted = tuple(i for i in wanted_of(sample) if f"x{i}" in found)
    outputs = [(f"x{i}.grad", found[f"x{i}"]) for i in wanted]
    function = g.function("main", outputs)
    return Case(name, number, Module("global", (function,)), wanted, operands, seeds)


def kind_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def by_autograd(one: Case) -> list[torch.Tensor]:
    """What torch says: the gradients of the operands `wanted`."""
    sample = SAMPLES[one.name][one.number]
    operands = [t.detach().clone().requires_grad_(i in one.wanted) for i, t in enumerate(one.operands)]
    forward = Builder()
    values = [forward.input(f"x{i}", kind_of(t)) for i, t in enumerate(operands)]
    forward.emit(one.name, *values, **sample.attrs)
    results = [r for r in differentiable_results(forward.ops[0], operands) if r.is_floating_point()]
    pairs = [(r, s) for r, s in zip(results, one.seeds, strict=True) if r.requires_grad]
    found = torch.autograd.grad(
        [r for r, _ in pairs], [operands[i] for i in one.wanted], [s for _, s in pairs], allow_unused=True
    )
    return [torch.zeros_like(operands[i]) if f is None else f for i, f in zip(one.wanted, found, strict=True)]


def differentiable_results(op: Op, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results of an op, by what autograd can differentiate: not by `aten::silu_backward`."""
    if op.name == "silu_grad":
        x, grad = operands
        x = x if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.silu(x), x, grad, create_graph=True)
    return evaluate(op, operands)


def run(function: Function, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a function, op by op."""
    values = dict(inputs)
    for op in function.ops:
        for value, result in zip(op.results, evaluate(op, [values[v.name] for v in op.operands]), strict=True):
            values[value.name] = result
    return [values[o.value.name] for o in function.outputs]


def largest_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number that is expected."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        assert one.dtype == other.dtype
        if other.numel():
            worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1)))
    return worst
