"""Shared parts of elementwise ops: type inference, factor rule, entries and spellings of the plain case."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.table import (
    NO_GRADIENT,
    Attrs,
    Builder,
    Code,
    Cost,
    ElementOf,
    Overwriting,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    broadcast_shape,
    define,
    flops_per_result,
    gradient_of,
    onnx,
    operands,
    parse_rule,
    pointwise_sizes,
    promote,
)
from distir_relax.ops.table.entry import Infer, OperandGradient


def same_dtype(types: Types) -> str:
    """Return the common dtype of all operands; raise ValueError if they differ."""
    if len({t.dtype for t in types}) != 1:
        raise ValueError(f"operands have dtypes {[t.dtype for t in types]}, expected one")
    return types[0].dtype


def infer_common(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the common dtype of the operands, and the shape that they broadcast to."""
    return (TensorType(broadcast_shape(types), same_dtype(types)),)


def pointwise_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Return the rule of ops in which each result element depends on the elements at its position."""
    return parse_rule(", ".join(["..."] * len(types)) + " -> ...", [t.shape for t in types], [results[0].shape])


def define_unary(
    name: str,
    torch: str,
    relax: str = "",
    *,
    linear: bool = False,
    flops: float = 1.0,
    patterns: tuple[str, ...] = (),
    gradient: OperandGradient = None,
    steps: bool = False,
    infer: Infer = infer_common,
    sizes: Callable[..., Any] | None = None,
    element: ElementOf | None = None,
    native: bool = False,
) -> None:
    """Define an op of one operand, by default with its type, and with `flops` operations per element.

    With `steps` it is piecewise constant. `sizes` computes an element that is a size. `element` is as in `Semantics`,
    and `native` whether it has `Trait.NATIVE`.
    """
    define(
        name,
        Semantics(
            infer=infer,
            torch=torch,
            linear=(operands(0),) if linear else (),
            sizes=sizes and pointwise_sizes(sizes),
            element=element,
        ),
        Split(pointwise_rule),
        cost=Cost(flops=flops_per_result(flops)),
        code=Code(relax=relax, patterns=patterns),
        gradient=NO_GRADIENT if steps else gradient_of(gradient) if gradient else None,
        traits={Trait.POINTWISE, *([Trait.NATIVE] if native else [])},
        kernels=_overwriting(torch, infer),
    )


def define_binary(
    name: str,
    torch: str,
    *linear: frozenset[int],
    relax: str = "",
    commutative: bool = False,
    divides: bool = False,
    gradients: tuple[OperandGradient, ...] = (),
    steps: bool = False,
    infer: Infer = infer_common,
    numbers: bool = True,
    sizes: Callable[..., Any] | None = None,
    element: ElementOf | None = None,
    native: bool = False,
) -> None:
    """Define a broadcasting op of two operands of one dtype; if it `divides`, the second must not be 0.

    With `steps` it is piecewise constant. Its torch code accepts Python numbers if it is an operator, unless `numbers`
    is false. `sizes` computes an element from two sizes. `element` is as in `Semantics`, and `native` whether it has
    `Trait.NATIVE`.
    """
    is_operator = not torch.startswith("torch.")
    define(
        name,
        Semantics(infer=infer, torch=torch, linear=linear, sizes=sizes and pointwise_sizes(sizes), element=element),
        Split(pointwise_rule, divisors=operands(1) if divides else ()),
        code=Code(relax=relax, numbers=operands(0, 1) if numbers and is_operator else operands()),
        gradient=NO_GRADIENT if steps else gradient_of(*gradients) if gradients else None,
        traits={*(Trait.POINTWISE, *([Trait.COMMUTATIVE] if commutative else []), *([Trait.NATIVE] if native else []))},
        kernels=_overwriting(torch, infer),
    )


_WITH_OUT = {
    "-{0}": "torch.neg({0}, out={out})",
    "{0} + {1}": "torch.add({0}, {1}, out={out})",
    "{0} - {1}": "torch.sub({0}, {1}, out={out})",
    "{0} * {1}": "torch.mul({0}, {1}, out={out})",
    "{0} / {1}": "torch.div({0}, {1}, out={out})",
}


def _overwriting(torch: str, infer: Infer) -> list[Overwriting]:
    """Return the kernel of an op by its torch expression; none if torch does not write it to given memory."""
    if infer is not infer_common:
        return []
    if torch in _WITH_OUT:
        return [Overwriting(_WITH_OUT[torch])]
    call = re.fullmatch(r"(torch\.\w+)\(\{0\}(, \{1\})?\)", torch)
    return [Overwriting(f"{torch[:-1]}, out={{out}})")] if call else []


def aten_binary(name: str, *spellings: str, floating: bool = False) -> None:
    """Register ATen ops that are op `name` of two operands, tensors or numbers, promoted to one dtype."""

    def convert(g: Builder, a: Any, b: Any) -> Any:
        return g.emit(name, *promote(g, a, b, floating=floating))

    aten(*spellings)(convert)


def aten_unary(name: str, *spellings: str, floating: bool = False) -> None:
    """Register ATen ops that are op `name` of one operand."""

    def convert(g: Builder, x: Any) -> Any:
        return g.emit(name, promote(g, x, floating=True)[0] if floating else x)

    aten(*spellings)(convert)


def onnx_pointwise(op_type: str, name: str) -> None:
    """Register an ONNX op that is op `name` of its broadcasting operands."""

    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        return g.emit(name, *x.pointwise())

    onnx(op_type)(convert)


def onnx_folded(op_type: str, name: str) -> None:
    """Register a variadic ONNX op: a left fold of op `name`."""

    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        total, *rest = x.pointwise()
        for item in rest:
            total = g.emit(name, total, item)
        return total

    onnx(op_type)(convert)
