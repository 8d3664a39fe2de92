"""Backward steps of ops, written as ops of the table.

A step takes the operands and results of an op and the gradients of its results, and gives the gradients of its operands
(reverse-mode differentiation). Only the forward values that the formula names are saved. Since it is written with ops
of the table, factor rules apply: a backward program is partitioned, scheduled and checked like any other.

The gradient of one operand is a text or a function:

- ``multiply(g, subtract(1.0, square(y)))``: `g` is the gradient of the op's result, `y` the result, ``0`` and ``1`` are
  operands, numbers with a decimal point are constants of the gradient's dtype;
- a function of the `Backward` step that returns a value.

None stands for an operand without gradient, such as indices and masks.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from distir_relax.ir import Attribute, Op, Value
from distir_relax.ops.table.builder import Builder
from distir_relax.ops.table.entry import Gradient, OperandGradient
from distir_relax.ops.table.helpers import broadcast_to, filled, reshape_to


@dataclass(frozen=True)
class Backward:
    """The backward step of `op`, with `g` to emit its ops.

    `grads` are the gradients of its results, at least one; None for a result without users. `wrt` are the operands
    whose gradients are requested. `so_far` is the gradient of operand 0 due to others, if the `Gradient` accumulates.
    """

    g: Builder
    op: Op
    grads: tuple[Value | None, ...]
    wrt: frozenset[int]
    so_far: Value | None = None
    _emitted: dict[str, Value] = field(default_factory=dict)

    @property
    def grad(self) -> Value:
        """The gradient of the first result."""
        grad = self.grads[0]
        assert grad is not None
        return grad

    @property
    def attrs(self) -> Any:
        """The op's attributes."""
        return self.op.attrs

    def x(self, index: int = 0) -> Value:
        """Return an operand of the op."""
        return self.op.operands[index]

    def y(self, index: int = 0) -> Value:
        """Return a result of the op."""
        return self.op.results[index]

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op: see `Builder.emit`."""
        return self.g.emit(name, *operands, **attrs)

    def number(self, value: float, like: Value | None = None) -> Value:
        """Return a constant in the dtype of `like`, by default of the gradient."""
        return self.g.constant(value, (like or self.grad).tensor.dtype)

    def write(self, text: str) -> Value:
        """Emit the ops of a gradient's text and return its value."""
        result: Value = self._write(_parse(text))
        return result

    def zeros(self, like: Value) -> Value:
        """Return zeros of the type of a value."""
        return filled(self.g, like.tensor.shape, 0.0, like.tensor.dtype)  # type: ignore[no-any-return]

    def keepdims(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """Broadcast `value`, reduced over `axes` of a tensor of `shape`, back to `shape` with these dims."""
        ones = tuple(1 if d in axes else n for d, n in enumerate(shape))
        return broadcast_to(self.g, reshape_to(self.g, value, ones), tuple(shape))  # type: ignore[no-any-return]

    def _write(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(index)):
                return self.x(index)
            case ast.Constant(value=float(number)):
                return self.number(number)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(number))):
                return self.number(-number)
            case ast.Name(id="g"):
                return self.grad
            case ast.Name(id="y"):
                return self.y()
            case ast.Call():
                text = ast.unparse(node)
                if text not in self._emitted:
                    operands = [self._write(argument) for argument in node.args]
                    self._emitted[text] = self.emit(ast.unparse(node.func), *operands)
                return self._emitted[text]
        raise ValueError(f"not the text of a gradient: {ast.unparse(node)}")


def backward_step(gradient: Gradient, backward: Backward) -> tuple[Value | None, ...]:
    """Emit the backward step and return the gradient of each operand, None if there is none or it is not requested."""
    op, wrt = backward.op, backward.wrt
    if gradient.all is not None:
        grads = tuple(gradient.all(backward))
    else:
        formulas = (*gradient.operands, *[None] * (len(op.operands) - len(gradient.operands)))
        grads = tuple(_operand_gradient(backward, one) if i in wrt else None for i, one in enumerate(formulas))
    return tuple(
        None if value is None or i not in wrt else _sum_to(backward.g, value, op.operands[i].tensor.shape)
        for i, value in enumerate(grads)
    )


def _operand_gradient(backward: Backward, gradient: OperandGradient) -> Value | None:
    if gradient is None:
        return None
    return backward.write(gradient) if isinstance(gradient, str) else gradient(backward)


def _sum_to(g: Builder, value: Value, shape: tuple[int, ...]) -> Value:
    """Sum `value` over the dims along which an operand of `shape` was broadcast to it."""
    have = value.tensor.shape
    if have == shape:
        return value
    new = len(have) - len(shape)
    axes = tuple(d for d, n in enumerate(have) if d < new or (shape[d - new] == 1 and n != 1))
    if axes:
        value = g.emit("sum", value, axis=axes, keepdims=False)
    return reshape_to(g, value, shape)  # type: ignore[no-any-return]


@cache
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
