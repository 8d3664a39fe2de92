"""Padding with numbers of the tensor itself: reflected, repeated from the edge, or from the other end.

Each is written as slices, `flip` and `concat`, dim by dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MODES = ("reflect", "replicate", "circular")


def pad_from_within(g: Any, x: Any, low: Sequence[int], high: Sequence[int], mode: str) -> Any:
    """`x` with `low[d]` and `high[d]` more elements at the ends of each dim `d`, by ``torch.nn.functional.pad``'s mode.

    Raises NotImplementedError for another mode than `MODES`, for negative widths, and for more elements than there are.
    """
    if mode not in MODES:
        raise NotImplementedError(f"padding of mode {mode!r}")
    for size, *widths in zip(x.type.shape, low, high, strict=True):
        most = {"reflect": size - 1, "circular": size}.get(mode, max(widths))
        if any(widths) and not 0 <= min(widths) <= max(widths) <= most:
            raise NotImplementedError(f"padding of mode {mode!r} by {widths} of {size} elements")
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        if before or after:
            ends = (_WAYS[mode](g, x, axis, before, False), _WAYS[mode](g, x, axis, after, True))
            parts = [part for part, width in zip((ends[0], x, ends[1]), (before, 1, after), strict=True) if width]
            x = g.emit("concat", *parts, axis=axis)
    return x


def _reflected(g: Any, x: Any, axis: int, width: int, last: bool) -> Any:
    """The element at the edge is not repeated: ``2 1 | 0 1 2``."""
    size = x.type.shape[axis]
    begin = size - 1 - width if last else 1
    return g.emit("flip", _part(g, x, axis, begin, width), axis=axis)


def _repeated(g: Any, x: Any, axis: int, width: int, last: bool) -> Any:
    shape = x.type.shape
    edge = _part(g, x, axis, shape[axis] - 1 if last else 0, 1)
    return g.emit("broadcast_to", edge, shape=(*shape[:axis], width, *shape[axis + 1 :]))


def _from_other_end(g: Any, x: Any, axis: int, width: int, last: bool) -> Any:
    return _part(g, x, axis, 0 if last else x.type.shape[axis] - width, width)


def _part(g: Any, x: Any, axis: int, begin: int, width: int) -> Any:
    return g.emit("strided_slice", x, axes=(axis,), begin=(begin,), end=(begin + width,), strides=(1,))


_WAYS: dict[str, Callable[[Any, Any, int, int, bool], Any]] = dict(
    zip(MODES, (_reflected, _repeated, _from_other_end), strict=True)
)
