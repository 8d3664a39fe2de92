"""Attention whose keys are split: each device attends to its own, and the parts are joined.

The result of a part is that of attention to its keys alone, and the logarithm of its normalizer, the sum of the
exponentials of its scores. The share of a part in the whole is that of its normalizer. Devices exchange these, a number
for each row and head; the result times its share is then one term of a sum (Dao et al., FlashAttention, 2022; Liu et
al., Ring Attention, 2023).

If the rows are split along the same axis (`Split.ring`), devices exchange keys and values instead, and each joins the
parts of its rows. Parts to which no row of a device attends are neither sent to it nor computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Expansion, RingExpansion

KEPT = ("scale", "causal", "masked", "boolean", "bounded", "density")
"""The attributes of attention that its gradient and its parts have, too."""
ALGORITHMS = {
    "h": "all-to-all to heads",
    "s": "keys are gathered",
    "t": "keys stay split, parts joined by log-sum-exp",
    "s t": "ring: keys are exchanged in turns",
}
"""`Split.algorithms` of attention and its gradient, by heads, rows and keys."""


def split_keys(x: Expansion) -> tuple[Value, ...]:
    """Replace attention: each device gives its part of the result."""
    return _part_of_keys(x)[:1]


def split_keys_of_gradient(x: Expansion) -> tuple[Value, ...]:
    """Replace the gradient of attention: each device gives those of its keys and values, and its part of the queries'.

    The part of the result and the normalizers are those of the forward, if that has split keys too.
    """
    q, k, v, grad, *masks = x.operands
    y, largest, total, *masks = x.again(_part_of_keys)
    normalizers = x.emit("add", largest, x.emit("log", total))
    means = x.reduced(_means(x, y, grad, total.placed.dtype), "sum")
    results: tuple[Value, ...] = x.emit("attention_part_grad", q, k, v, grad, normalizers, means, *masks, **_kept(x))
    return results


def _part_of_keys(x: Expansion) -> tuple[Value, ...]:
    """Return a device's part of attention, the normalizers' largest logarithm, their sum, and the mask of its keys.

    Operands are those of attention or of its gradient.
    """
    q, k, v = x.operands[:3]
    masks = _local_masks(x, x.operands[len(x.operands) - bool(x.attrs["masked"]) :])
    y, normalizer = x.emit("attention_part", q, k, v, *masks, **_kept(x))
    largest = x.reduced(normalizer, "max")
    part = x.emit("exp", x.emit("subtract", normalizer, largest))
    total = x.reduced(part, "sum")
    return x.emit("multiply", y, _cast(x, x.emit("divide", part, total))), largest, total, *masks


def attend_in_turns(x: RingExpansion) -> tuple[Value, ...]:
    """Replace attention: each device attends to its own keys, and then to those of the others, one after the other."""
    return _joined_in_turns(x)[:1]


def attention_gradient_in_turns(x: RingExpansion) -> tuple[Value, ...]:
    """Replace the gradient of attention: gradients of the keys and values of others are returned to these.

    The result and the normalizers are those of the forward, if that takes turns too.
    """
    q, _, _, grad, *_ = x.operands
    y, *parts = x.again(_joined_in_turns)
    normalizers = _logarithm(x, *parts)
    wide = normalizers.placed.dtype
    means = _means(x, y, grad, wide)
    own: list[Value] = []
    returning: list[Value] = []
    for distance, needed, (keys, values, *masks) in _in_turns(x, 4):
        grads = x.emit("attention_part_grad", q, keys, values, grad, normalizers, means, *masks, **_kept(x))
        # Those of the turn before have arrived by now.
        own, returning = _with_returned(x, own, returning), []
        if own:
            own[0] = x.emit("add", own[0], _cast(x, grads[0], wide))
            returning = [x.returned(value, 2, distance, needed) for value in grads[1:]]
        else:
            own = [_cast(x, value, wide) for value in grads]
    own = _with_returned(x, own, returning)
    return tuple(_cast(x, value) for value in own)


def _with_returned(x: RingExpansion, own: list[Value], returned: Sequence[Value]) -> list[Value]:
    """Return the gradients of queries, keys and values, with those that others have computed added to the last two."""
    wide = own[0].placed.dtype if own else ""
    added = [x.added(total, _cast(x, value, wide), 2) for total, value in zip(own[1:], returned, strict=False)]
    return [*own[:1], *(added or own[1:])]


def _joined_in_turns(x: RingExpansion) -> tuple[Value, ...]:
    """Return attention to the keys of all devices, and its normalizers as `_logarithm` takes them.

    Operands are those of attention or of its gradient.
    """
    joined: tuple[Value, ...] = ()
    for _, _, (keys, values, *masks) in _in_turns(x, len(x.operands) - bool(x.attrs["masked"])):
        part, normalizers = x.emit("attention_part", x.operands[0], keys, values, *masks, **_kept(x))
        part = _cast(x, part, normalizers.placed.dtype)
        joined = _both(x, joined[0], _logarithm(x, *joined[1:]), part, normalizers) if joined else (part, normalizers)
    return _cast(x, joined[0]), *joined[1:]


def _both(x: Expansion, y: Value, n: Value, part: Value, of_part: Value) -> tuple[Value, ...]:
    """Return attention to two parts of the keys, of these normalizers, as `_joined_in_turns`."""
    largest = x.emit("maximum", n, of_part)
    shares = [x.emit("exp", x.emit("subtract", value, largest)) for value in (n, of_part)]
    total = x.emit("add", *shares)
    terms = (x.emit("multiply", value, share) for value, share in zip((y, part), shares, strict=True))
    return x.emit("divide", x.emit("add", *terms), total), largest, total


def _logarithm(x: Expansion, largest: Value, total: Value | None = None) -> Any:
    """Return the logarithm of normalizers from their largest, and their sum relative to it if it is not the only."""
    return largest if total is None else x.emit("add", largest, x.emit("log", total))


def _in_turns(x: RingExpansion, first_mask: int) -> Iterator[tuple[int, Sequence[bool], list[Value]]]:
    """Yield the distances of parts, by which index each is needed, and its keys, values and mask.

    The parts of the next distance are on their way before ops of this one are added.
    """
    masks = x.operands[first_mask:]
    is_bounded = bool(x.attrs.get("bounded"))
    moved = [(1, 2), (2, 2)] + [(first_mask, len(mask.placed.shape) - 1) for mask in masks if not is_bounded]
    ahead = [x.operands[number] for number, _ in moved]
    turns = _turns(x, x.arrays[first_mask] if is_bounded else None)
    for (distance, needed), following in zip(turns, [*turns[1:], None], strict=True):
        parts = ahead
        if following is not None:
            ahead = [x.fetched(x.operands[number], dim, *following) for number, dim in moved]
        yield distance, needed, [*parts, *(x.numbered(mask, distance) for mask in masks if is_bounded)]


def _turns(x: RingExpansion, bounds: Any) -> list[tuple[int, tuple[bool, ...]]]:
    """Return the distances of parts that some device attends to, and for each index whether it does."""
    turns = [(0, (True,) * x.count)]
    for distance in range(1, x.count):
        pairs = [(rows, x.second[(index + distance) % x.count]) for index, rows in enumerate(x.first)]
        needed = tuple(bounds is None or _attends(bounds, *pair) for pair in pairs)
        turns += [(distance, needed)] if any(needed) else []
    return turns


def _attends(bounds: Any, rows: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]) -> bool:
    """Return whether some row may attend to one of the keys: by the first and the last key of rows in a row."""
    for start, stop in rows:
        own = bounds if len(bounds) == 1 else bounds[start:stop]
        first, end = int(own[:, 0].min()), int(own[:, 1].max())
        if any(first < last and begin < end for begin, last in keys):
            return True
    return False


def _means(x: Expansion, y: Value, grad: Value, dtype: str) -> Any:
    """Return the sum of a result times its gradient for each row: the mean of the gradients of its weights."""
    product = x.emit("multiply", _cast(x, y, dtype), _cast(x, grad, dtype))
    return x.emit("sum", product, axis=(3,), keepdims=True)


def _kept(x: Expansion) -> dict[str, Any]:
    return {name: x.attrs[name] for name in KEPT if name in x.attrs}


def _local_masks(x: Expansion, masks: Sequence[Value]) -> list[Value]:
    """Return the mask of a device's keys: bounds count from the first of these."""
    return [x.emit("subtract", masks[0], x.start("int64"))] if x.attrs.get("bounded") else [*masks]


def _cast(x: Expansion, value: Value, dtype: str = "") -> Any:
    dtype = dtype or x.types[0].dtype
    return value if value.placed.dtype == dtype else x.emit("astype", value, dtype=dtype)
