"""Updates of weights and optimizer state, which may be done in place.

Numbers that change from step to step (learning rate, bias corrections) are scalar operands; the options of an
optimizer are attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distir_relax.ir import TensorType
from distir_relax.ops.elementwise.pointwise import pointwise_rule, same_dtype
from distir_relax.ops.table import (
    Attrs,
    Code,
    Cost,
    InPlace,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    flops_per_result,
    operands,
    same_types,
)
from distir_relax.ops.table.entry import Sets, Work
from distir_relax.ops.table.kernel import Expression


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the type of the first operand, which the others share; the last ones may be scalars."""
    same_dtype(types)
    if mismatched := [t for t in types if t.shape not in (types[0].shape, ())]:
        raise ValueError(f"expected operands as {types[0]} or numbers, found {mismatched[0]}")
    return (types[0],)


def _define(
    name: str,
    torch: Expression,
    in_place: Expression,
    relax: Expression,
    flops: float,
    linear: Sets = (),
    gradient: int | None = None,
    workspace: Work | None = None,
    attributes: Sequence[tuple[str, str]] = (),
) -> None:
    """Define an elementwise op; `gradient` is the operand that is a weight gradient."""
    define(
        name,
        Semantics(infer=_infer, torch=torch, linear=linear, attributes=dict(attributes)),
        Split(pointwise_rule),
        cost=Cost(flops=flops_per_result(flops), workspace=workspace, weight_gradient=gradient),
        code=Code(relax=relax),
        kernels=[InPlace(in_place)] if in_place else [],
        traits={Trait.POINTWISE},
    )


# A gradient step with a constant learning rate, as in the programs of the DistIR paper.
_define(
    "sgd",
    "torch.sub({0}, {1}, alpha={rate})",
    "{0}.sub_({1}, alpha={rate})",
    "R.subtract({0}, R.multiply({1}, R.const({rate}, {1}.ty.dtype)))",
    flops=2,
    linear=(operands(0, 1),),
    gradient=1,
)

define(
    "assign",
    Semantics(infer=same_types, torch="{1}"),
    Split(pointwise_rule),
    code=Code(relax="{1}"),
    kernels=[InPlace("{0}.copy_({1})")],
    traits={Trait.POINTWISE},
)


def _infer_where(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    old, new, condition = types
    if old != new or condition != TensorType((), "bool"):
        raise ValueError(f"expected two tensors of a type and a bool scalar, found {old}, {new} and {condition}")
    return (old,)


# The second operand if the third is true, else the first: an update that may be skipped.
define(
    "assign_where",
    Semantics(infer=_infer_where, torch="torch.where({2}, {1}, {0})"),
    Split(pointwise_rule),
    code=Code(relax="R.where({2}, {1}, {0})"),
    kernels=[InPlace("torch.where({2}, {1}, {0}, out={0})")],
    traits={Trait.POINTWISE},
)


def _averaged(attrs: Attrs) -> str:
    """A single pass over memory if the weights add up to 1, or the new value has weight 1."""
    if attrs["weight"] == 1 - attrs["decay"]:
        return "{0}.lerp_({1}, {weight})"
    if attrs["weight"] == 1:
        return "torch.add({1}, {0}, alpha={decay}, out={0})"
    return "{0}.mul_({decay}).add_({1}, alpha={weight})"


_BLOCK = 1 << 16
"""Number of elements that `kernels.updates` processes at a time."""

_DECAY = ("decay", "the factor of the old value")

# x decay + g weight: a momentum, an exponential moving average.
_define(
    "moving_average",
    "{0} * {decay} + {1} * {weight}",
    _averaged,
    "R.add(R.multiply({0}, R.const({decay}, {0}.ty.dtype)), R.multiply({1}, R.const({weight}, {0}.ty.dtype)))",
    flops=3,
    linear=(operands(0, 1),),
    gradient=1,
    attributes=[_DECAY, ("weight", "the factor of the new value")],
)

# x decay + g g (1 - decay): an exponential moving average of squares.
_define(
    "moving_square",
    "torch.addcmul({0} * {decay}, {1}, {1}, value=1 - {decay})",
    "updates.moving_square({0}, {1}, {decay})",
    "R.add(R.multiply({0}, R.const({decay}, {0}.ty.dtype)), "
    "R.multiply(R.multiply({1}, {1}), R.const(1 - {decay}, {0}.ty.dtype)))",
    flops=4,
    gradient=1,
    attributes=[_DECAY],
)

# x + alpha y: a gradient with weight decay, or with momentum.
_define(
    "add_scaled",
    "torch.add({0}, {1}, alpha={alpha})",
    "",
    "R.add({0}, R.multiply({1}, R.const({alpha}, {0}.ty.dtype)))",
    flops=2,
    linear=(operands(0, 1),),
    gradient=0,
    attributes=[("alpha", "the factor of the second operand")],
)


def _decay(rate: int, in_place: bool = False) -> Callable[[Attrs], str]:
    """Return the code of a weight times ``1 - rate decay``: decoupled weight decay."""

    def code(attrs: Attrs) -> str:
        if not attrs["decay"]:
            return "{0}"
        factor = f"(1 - {{{rate}}} * {{decay}})"
        return f"{{0}}.mul_{factor}" if in_place else f"({{0}} * {factor})"

    return code


def _decay_relax(rate: int) -> Callable[[Attrs], str]:
    def code(attrs: Attrs) -> str:
        one, decay = "R.const(1.0, {0}.ty.dtype)", "R.const({decay}, {0}.ty.dtype)"
        factor = f"R.subtract({one}, R.multiply({{{rate}}}, {decay}))"
        return f"R.multiply({{0}}, {factor})" if attrs["decay"] else "{0}"

    return code


_SHRINKS = ("decay", "how fast weights shrink beside the gradient's step, in units of the rate")

# Weight, gradient, rate: w (1 - rate decay) - rate g.
_define(
    "sgd_step",
    lambda attrs: f"torch.addcmul({_decay(2)(attrs)}, {{1}}, {{2}}, value=-1)",
    lambda attrs: f"{_decay(2, True)(attrs)}.addcmul_({{1}}, {{2}}, value=-1)",
    lambda attrs: f"R.subtract({_decay_relax(2)(attrs)}, R.multiply({{1}}, {{2}}))",
    flops=3,
    linear=(operands(0, 1),),
    gradient=1,
    attributes=[_SHRINKS],
)

# Weight, average, average of squares, rate, size, floor: w (1 - rate decay) - size m / (sqrt(v) + floor).
_define(
    "adam_step",
    lambda attrs: f"torch.addcmul({_decay(3)(attrs)}, {{1}} / ({{2}}.sqrt() + {{5}}), {{4}}, value=-1)",
    "updates.adam_step({0}, {1}, {2}, {3}, {4}, {5}, {decay})",
    lambda attrs: (
        f"R.subtract({_decay_relax(3)(attrs)}, R.multiply(R.divide({{1}}, R.add(R.sqrt({{2}}), {{5}})), {{4}}))"
    ),
    flops=7,
    workspace=lambda types, attrs, results: 4.0 * min(results[0].elements, _BLOCK),
    attributes=[_SHRINKS],
)
