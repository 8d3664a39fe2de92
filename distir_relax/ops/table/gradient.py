"""How an op is differentiated: its backward step, as ops of the table.

A step takes the op's operands and results and the gradients of its results, and gives the gradients of its operands
(reverse-mode differentiation, with as little of the forward step kept as the formula names). What is written with the
table's ops has their factor rules: a backward program is split, placed and checked like any other.

The gradient of one operand is a text or a function:

- ``multiply(g, subtract(1.0, square(y)))``: `g` is the gradient of the op's result, `y` the result, ``0`` and ``1`` are
  operands, numbers with a point are constants of the gradient's dtype;
- a function of the `Backward` step gives a value.

None is an operand that no gradient passes to: indices, masks.
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
    """The backward step of `op`, whose ops are written with `g`.

    `grads` are the gradients of its results, at least one; None for a result that nothing depends on. `wanted` says of
    which operands gradients are requested.
    """

    g: Builder
    op: Op
    grads: tuple[Value | None, ...]
    wanted: frozenset[int]
    _written: dict[str, Value] = field(default_factory=dict)

    @property
    def grad(self) -> Value:
        """The gradient of the first result."""
        found = self.grads[0]
        assert found is not None
        return found

    @property
    def attrs(self) -> Any:
        """The op's attributes."""
        return self.op.attrs

    def x(self, index: int = 0) -> Value:
        """An operand of the op."""
        return self.op.operands[index]

    def y(self, index: int = 0) -> Value:
        """A result of the op."""
        return self.op.results[index]

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op: see `Builder.emit`."""
        return self.g.emit(name, *operands, **attrs)

    def number(self, value: float, like: Value | None = None) -> Value:
        """A constant in the dtype of a value, of the gradient unless another is given."""
        return self.g.constant(value, (like or self.grad).tensor.dtype)

    def write(self, text: str) -> Value:
        """The value that a gradient's text describes."""
        found: Value = self._write(_parsed(text))
        return found

    def zeros(self, like: Value) -> Value:
        """Zeros of the type of a value."""
        return filled(self.g, like.tensor.shape, 0.0, like.tensor.dtype)  # type: ignore[no-any-return]

    def keepdims(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """`value`, reduced over `axes` of a tensor of `shape`, with these dims as ones again, broadcast to `shape`."""
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
                if text not in self._written:
                    operands = [self._write(argument) for argument in node.args]
                    self._written[text] = self.emit(ast.unparse(node.func), *operands)
                return self._written[text]
        raise ValueError(f"not the text of a gradient: {ast.unparse(node)}")


def backward_step(gradient: Gradient, backward: Backward) -> tuple[Value | None, ...]:
    """Write the backward step: the gradient of each operand, None where none passes or none is wanted."""
    op, wanted = backward.op, backward.wanted
    if gradient.all is not None:
        found = tuple(gradient.all(backward))
    else:
        given = (*gradient.operands, *[None] * (len(op.operands) - len(gradient.operands)))
        found = tuple(_of_operand(backward, one) if i in wanted else None for i, one in enumerate(given))
    return tuple(
        None if value is None or i not in wanted else _summed_to(backward.g, value, op.operands[i].tensor.shape)
        for i, value in enumerate(found)
    )


def _of_operand(backward: Backward, gradient: OperandGradient) -> Value | None:
    if gradient is None:
        return None
    return backward.write(gradient) if isinstance(gradient, str) else gradient(backward)


def _summed_to(g: Builder, value: Value, shape: tuple[int, ...]) -> Value:
    """`value` summed over the dims along which an operand of `shape` has been broadcast to it."""
    have = value.tensor.shape
    if have == shape:
        return value
    new = len(have) - len(shape)
    axes = tuple(d for d, n in enumerate(have) if d < new or (shape[d - new] == 1 and n != 1))
    if axes:
        value = g.emit("sum", value, axis=axes, keepdims=False)
    return reshape_to(g, value, shape)  # type: ignore[no-any-return]


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
