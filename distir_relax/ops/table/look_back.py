"""Windows that look back: incremental forms of ops that move positions by a constant, or read those before.

Padding, slicing, concatenation and convolution along a sequence read, for position ``r`` of the result, the positions
``r - low`` to ``r - low + reach`` of their operand. Earlier calls leave those that the new positions do not have.
"""

from __future__ import annotations

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table.helpers import reshape_to
from distir_relax.ops.table.incremental import IncrementalStep


def look_back(step: IncrementalStep, number: int, low: int, reach: int = 0, fill: float = 0.0) -> Value:
    """Return the positions of an operand that the new positions of the result read.

    These are, of the operand after `low` elements of padding (or without its first ``-low``), the ones from the first
    new position of the result to the last one, and `reach` more. Positions after the last one are `fill`, those before
    the first one are zero if the operand has no fewer positions than the sequence.
    """
    x, axis, extra = step.operands[number], step.dim, step.extras[number]
    assert extra is not None
    back = low + min(extra, 0) - min(step.extra, 0)
    after = step.extra - extra - low + reach
    if back > 0:
        shape = tuple(back if d == axis else n for d, n in enumerate(x.tensor.shape))
        past = step.state(TensorType(shape, x.tensor.dtype), "window")
        x = step.emit("concat", past, x, axis=axis)
        step.keep(past, _slice(step, x, step.new, step.new + back))
    first, last = max(-back, 0), x.tensor.shape[axis] + min(after, 0)
    if back < 0 or after < 0:
        x = _slice(step, x, first, last)
    if after > 0:
        none = (0,) * len(x.tensor.shape)
        x = step.emit("pad", x, low=none, high=tuple(after * (d == axis) for d in range(len(none))), value=fill)
    return x


def fill_before(step: IncrementalStep, x: Value, low: int, fill: Value | float) -> Value:
    """Replace the first `low` positions of the sequence in `x`, a result of `look_back`.

    `fill` is a number, or has `low` elements along the dim of the sequence.
    """
    axis, rank = step.dim, len(x.tensor.shape)
    first, count = step.past + min(step.extra, 0), x.tensor.shape[axis]
    position = step.emit("arange", start=first, end=first + count, stride=1, dtype="int64")
    filling: Value = fill if isinstance(fill, Value) else step.g.constant(fill, x.tensor.dtype)
    if isinstance(fill, Value) and low > 1:
        place = step.emit("minimum", position, step.g.constant(low - 1, "int64"))
        if step.extra < 0:
            place = step.emit("maximum", place, step.g.constant(0, "int64"))
        filling = step.emit("take", fill, place, axis=axis)
    is_before = step.emit("less", position, step.g.constant(low, "int64"))
    is_before = reshape_to(step.g, is_before, (count, *(1,) * (rank - 1 - axis)))
    replaced: Value = step.emit("where", is_before, filling, x)
    return replaced


def _slice(step: IncrementalStep, x: Value, first: int, last: int) -> Value:
    part: Value = step.emit("strided_slice", x, axes=(step.dim,), begin=(first,), end=(last,), strides=(1,))
    return part
