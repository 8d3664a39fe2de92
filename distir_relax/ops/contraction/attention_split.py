"""Attention whose keys are split: each device attends to its own, and the parts are joined.

The result of a part is that of attention to its keys alone, and the logarithm of its normalizer, the sum of the
exponentials of its scores. The share of a part in the whole is that of its normalizer. Devices exchange these, a number
for each row and head; the result times its share is then one term of a sum (Dao et al., FlashAttention, 2022; Liu et
al., Ring Attention, 2023).

If the rows are split along the same axis (`Split.ring`), devices exchange keys and values instead, and each joins the
parts of its rows. Parts to which no row of a device attends are neither sent to it nor computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    q, k, v, *masks = x.operands
    y, normalizer = x.emit("attention_part", q, k, v, *_local_masks(x, masks), **_kept(x))
    share, *_ = _joined(x, normalizer)
    return (x.emit("multiply", y, _cast(x, share)),)


def split_keys_of_gradient(x: Expansion) -> tuple[Value, ...]:
    """Replace the gradient of attention: each device gives those of its keys and values, and its part of the queries'.

    Normalizers are computed again, as scores are.
    """
    q, k, v, grad, *masks = x.operands
    masks = _local_masks(x, masks)
    y, normalizer = x.emit("attention_part", q, k, v, *masks, **_kept(x))
    share, largest, total = _joined(x, normalizer)
    normalizers = x.emit("add", largest, x.emit("log", total))
    wide = normalizer.placed.dtype
    product = x.emit("multiply", _cast(x, y, wide), _cast(x, grad, wide))
    means = x.emit("multiply", x.emit("sum", product, axis=(3,), keepdims=True), share)
    results: tuple[Value, ...] = x.emit(
        "attention_part_grad", q, k, v, grad, normalizers, x.reduced(means, "sum"), *masks, **_kept(x)
    )
    return results


def attend_in_turns(x: RingExpansion) -> tuple[Value, ...]:
    """Replace attention: each device attends to its own keys, and then to those of the others, one after the other."""
    y, _ = _joined_in_turns(x)
    return (_cast(x, y),)


def attention_gradient_in_turns(x: RingExpansion) -> tuple[Value, ...]:
    """Replace the gradient of attention: gradients of the keys and values of others are returned to these.

    Normalizers are computed again, as scores are.
    """
    q, _, _, grad, *_ = x.operands
    y, logarithms = _joined_in_turns(x)
    normalizers = logarithms()
    wide = normalizers.placed.dtype
    means = x.emit("sum", x.emit("multiply", y, _cast(x, grad, wide)), axis=(3,), keepdims=True)
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


def _joined_in_turns(x: RingExpansion) -> tuple[Value, Callable[[], Value]]:
    """Return attention to the keys of all devices, in the dtype of normalizers, and a function that adds these."""
    first_mask = len(x.operands) - bool(x.attrs["masked"])
    joined: tuple[Value, Callable[[], Value]] | None = None
    for _, _, (keys, values, *masks) in _in_turns(x, first_mask):
        part, logarithms = x.emit("attention_part", x.operands[0], keys, values, *masks, **_kept(x))
        part = _cast(x, part, logarithms.placed.dtype)
        joined = (
            (part, lambda n=logarithms: n) if joined is None else _both(x, joined[0], joined[1](), part, logarithms)
        )
    assert joined is not None
    return joined


def _both(x: Expansion, y: Value, n: Value, part: Value, of_part: Value) -> tuple[Value, Callable[[], Value]]:
    """Return attention to two parts of the keys, of these normalizers, as `_joined_in_turns`."""
    largest = x.emit("maximum", n, of_part)
    shares = [x.emit("exp", x.emit("subtract", value, largest)) for value in (n, of_part)]
    total = x.emit("add", *shares)
    terms = (x.emit("multiply", value, share) for value, share in zip((y, part), shares, strict=True))
    return x.emit("divide", x.emit("add", *terms), total), lambda: x.emit("add", largest, x.emit("log", total))


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


def _kept(x: Expansion) -> dict[str, Any]:
    return {name: x.attrs[name] for name in KEPT if name in x.attrs}


def _local_masks(x: Expansion, masks: Sequence[Value]) -> list[Value]:
    """Return the mask of a device's keys: bounds count from the first of these."""
    return [x.emit("subtract", masks[0], x.start("int64"))] if x.attrs.get("bounded") else [*masks]


def _joined(x: Expansion, normalizer: Value) -> tuple[Value, Value, Value]:
    """Return the share of a device's part, the largest of the normalizers' logarithms, and their sum relative to it."""
    largest = x.reduced(normalizer, "max")
    part = x.emit("exp", x.emit("subtract", normalizer, largest))
    total = x.reduced(part, "sum")
    return x.emit("divide", part, total), largest, total


def _cast(x: Expansion, value: Value, dtype: str = "") -> Any:
    dtype = dtype or x.types[0].dtype
    return value if value.placed.dtype == dtype else x.emit("astype", value, dtype=dtype)
