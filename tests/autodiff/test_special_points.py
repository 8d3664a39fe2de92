"""Gradients at special points against torch's autograd: zeros, bounds, thresholds, ties, infinities.

Entries of the op table are compared by their samples, ATen ops by their sample calls: an op of torch's that is written
with several entries has its own subgradients, which the entries' need not add up to.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - declares ops of its own

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from aten_calls import CALLS, Call, call
from gradients import by_autograd, case, differentiable, kind_of, run
from samples import SAMPLES, draw
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from training import Training

from distir_relax.autodiff import gradients
from distir_relax.frontends.torch.graph import _normalize
from distir_relax.interpret import interpret
from distir_relax.ir import Value
from distir_relax.ops import Builder, Trait, aten_of, lookup

FINITE = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 20.0, -20.0]).double()
"""Zeros of both signs, and the bounds and thresholds of activations and losses."""
ALL = torch.cat([FINITE, torch.tensor([math.inf, -math.inf])])
POINTS = ("drawn", "rounded", "zeros", "ones", "finite")

# Entries


def at(x: torch.Tensor, how: str, generator: torch.Generator) -> torch.Tensor:
    """A drawn operand moved to special points; rounded, a normal distribution is full of zeros and of ties."""
    if not x.is_floating_point() or how == "drawn":
        return x
    if how in ("rounded", "zeros", "ones"):
        return {"rounded": torch.round, "zeros": torch.zeros_like, "ones": torch.ones_like}[how](x)
    pool = ALL if how == "all" else FINITE
    rounds = [torch.randperm(len(pool), generator=generator) for _ in range(x.numel() // len(pool) + 1)]
    return pool[torch.cat(rounds)[: x.numel()]].reshape(x.shape).to(x.dtype)


def has_autograd(name: str, number: int) -> bool:
    """Whether torch's subgradients are those of the reference expression, rather than of an ATen op it is part of.

    Torch has no second derivative of SiLU, except by a formula with other values at infinity.
    """
    has_others = name in ("safe_sqrt", "nn.binary_cross_entropy", "silu_grad")
    return not has_others and "ties" not in SAMPLES[name][number].attrs


@pytest.mark.drawn(50)
@pytest.mark.parametrize(("name", "number"), [one for one in differentiable() if has_autograd(*one)], ids=str)
def test_an_entry_has_autograd_s_gradients(name: str, number: int) -> None:
    drawn = case(name, number)
    for how in ("zeros", "ones", "rounded", "finite", *["all"] * (Trait.POINTWISE in lookup(name).traits)):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            one = replace(drawn, operands=tuple(at(x, how, generator) for x in drawn.operands))
            found = interpret(one.module, one.inputs).values()
            check(list(found), by_autograd(one), f"{how} {one.operands}", nan=True)


def check(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], where: str, nan: bool) -> None:
    """Equal within rounding; where torch has NaN, a number is as good unless `nan`."""
    for a, b in zip(found, expected, strict=True):
        error = 1e-6 if a.dtype == torch.float64 else 2e-2
        a = a if nan else a.where(~b.isnan(), math.nan)
        torch.testing.assert_close(a, b, rtol=error, atol=error / 100, equal_nan=True, msg=lambda m: f"{where}: {m}")


# ATen ops

EDGES = [
    ("hinge_embedding_loss.default", call(torch.tensor([0.7, 0.7, 0.0, 1.0]), torch.tensor([1.0, -1, 0, -1]), 0.7, 0)),
    ("cosine_embedding_loss.default", call(torch.eye(2), torch.eye(2).flip(0), -torch.ones(2), 0.0, 0)),
    ("threshold.default", call("f32[3,6]", 0.5, 7.0)),
    ("clamp.default", call("f32[3,6]", -0.5, 3.0)),
    ("softplus.default", call("f32[3,6]")),
    ("linalg_vector_norm.default", call("f32[3,4]", 1.5, [0])),
    ("binary_cross_entropy.default", call(torch.tensor([0, 1, 0, 1, 1e-13, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0.5]))),
]
"""Calls with points of their own."""
NOT_DIFFERENTIATED = {
    *("remainder.Scalar_Tensor", "copy.default", "floor_divide.default", "bernoulli.p"),
    *("scatter.src", "scatter_.src", "scatter.reduce", "scatter.value_reduce"),
    *("grid_sampler_2d.default", "_embedding_bag_forward_only.default"),
}
"""ATen ops that torch cannot differentiate, or not with the arguments of their calls, and cubics."""
OTHERWISE = {
    ("scatter_reduce.two", 7): "torch counts the element that is not included among those that share the gradient",
    ("scatter_reduce.two", 8): "torch counts the element that is not included among those that share the gradient",
    ("smooth_l1_loss.default", 2): "torch has -g for both operands; F.smooth_l1_loss calls l1_loss for a beta of 0",
    ("pow.Tensor_Scalar", 2): "torch takes a reciprocal root: -0 ** -0.5 is -inf",
    ("fmod.Tensor", 0): "torch has a gradient where the remainder, by zero, is NaN",
    **{
        (name, number): "torch does not say which of equal elements has the rank"
        for name in ("kthvalue.default", "median.dim", "nanmedian.dim")
        for number in (0, 1)
    },
    ("cross_entropy_loss.default", 11): "weights that add up to zero",
}
"""Calls whose gradients differ from torch's at some of the points, and why: they are compared as drawn."""


@pytest.mark.drawn(125)
@pytest.mark.parametrize("spelling", [s for s in CALLS if s.count(".") == 1 and s not in NOT_DIFFERENTIATED])
def test_an_aten_op_has_autograd_s_gradients(spelling: str) -> None:
    for number, arguments in enumerate([*CALLS[spelling], *(c for s, c in EDGES if s == spelling)]):
        for how in POINTS[:1] if (spelling, number) in OTHERWISE else POINTS:
            for seed in range(2 if how in ("rounded", "finite") else 1):
                compare(spelling, arguments, how, seed, f"call {number}, {how} {seed}")


def compare(spelling: str, arguments: Call, how: str, seed: int, where: str) -> None:
    """One call at points of a kind, in float64 unless the call has another dtype."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = tree_map(lambda x: operand(x, how, generator), arguments)
    op: Any = operator.attrgetter(f"aten.{spelling}")(torch.ops)
    leaves, results = by_torch(op, args, kwargs)
    known = {id(x) for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
    g = Builder()
    g.training = True
    values = {
        id(x): g.array(x, "known") if id(x) in known else g.input(f"x{i}", kind_of(x)) for i, x in enumerate(leaves)
    }
    named = lambda x: values.get(id(x), x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, kwargs = tree_map(named, _normalize(op, args, kwargs))
    made = aten_of(spelling, False)(g, *args, **kwargs)
    made = [v for v in tree_leaves(made, is_leaf=lambda v: isinstance(v, Value)) if isinstance(v, Value)]
    pairs = [(v, r) for v, r in zip(made, results, strict=False) if r.requires_grad]
    if not pairs:
        return
    seeds = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for _, r in pairs]
    given = {v.name: g.input(f"g{i}", v.tensor) for i, (v, _) in enumerate(pairs)}
    wanted = [f"x{i}" for i, x in enumerate(leaves) if x.requires_grad]
    found = gradients(g, tuple(g.ops), given, wanted)
    inputs = {f"x{i}": x.detach() for i, x in enumerate(leaves)}
    inputs |= {given[v.name].name: s for (v, _), s in zip(pairs, seeds, strict=True)} | g.tensors
    function = g.function("main", list(found.items()))
    numbers = dict(zip(found, run(function, inputs), strict=True))
    sources = [x for x in leaves if x.requires_grad]
    expected = torch.autograd.grad([r for _, r in pairs], sources, seeds, materialize_grads=True)
    check(
        [numbers.get(n, torch.zeros_like(x)) for n, x in zip(wanted, sources, strict=True)], expected, where, nan=False
    )


def operand(x: Any, how: str, generator: torch.Generator) -> Any:
    """An argument of a call: text is drawn."""
    if isinstance(x, str) and "[" in x:
        return at(draw(x.replace("f32[", "f64["), generator), how, generator)
    return x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def by_torch(
    op: Any, args: Any, kwargs: Any, blind: tuple[str, ...] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of the arguments, in order, and the op's results; arguments in `blind` have no gradient."""
    owners = {id(x): name for name, x in _named(op, args, kwargs)}
    leaves = [x for _, x in _named(op, args, kwargs)]
    for x in leaves:
        x.requires_grad_(x.is_floating_point() and owners[id(x)] not in blind)
    fresh = lambda x: x.clone() if isinstance(x, torch.Tensor) and op._schema.is_mutable else x  # noqa: E731
    try:
        results = op(*tree_map(fresh, args), **tree_map(fresh, kwargs))
    except RuntimeError as error:
        refused = re.search(r"not differentiable with respect to argument '(\w+)'", str(error))
        if not refused:
            raise
        return by_torch(op, args, kwargs, (*blind, refused[1]))
    return leaves, [r for r in tree_leaves(results) if isinstance(r, torch.Tensor)]


def _named(op: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    pairs = [*zip((a.name for a in op._schema.arguments), args, strict=False), *kwargs.items()]
    return [(name, x) for name, item in pairs for x in tree_leaves(item) if isinstance(x, torch.Tensor)]


# Models


class Distances(nn.Module):
    """Distances of points to each other, which are zero to themselves, directions and deviations of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        self.zeros = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = (self.points[:, None] - self.points[None]).norm(dim=-1)
        flat = x * self.zeros
        sizes = F.normalize(flat, dim=-1) + F.cosine_similarity(flat, x, dim=-1)[:, None] + flat.std(-1)[:, None]
        return (apart - 1).pow(2).mean() + (x.abs() * self.zeros).norm(3, dim=0).sum() + (sizes * x).sum()


def test_a_model_keeps_finite_gradients_at_zero_on_ranks() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Distances()
    model(x).backward()
    one = Training(model, (x,))
    for found in (one.whole(), one.on_ranks(3, {"x": "S[0]", "points": "S[1]"}), one.on_ranks(5, {"x": "S[1]"})):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[f"{name}.grad"], parameter.grad, rtol=1e-9, atol=1e-11)
