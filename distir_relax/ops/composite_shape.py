"""ATen ops that rearrange, or read by position, written as entries of the table."""

from __future__ import annotations

from typing import Any

from distir_relax.ops.pointwise import promote
from distir_relax.ops.registry import aten, lookup_aten
from distir_relax.ops.scatter import spread_to
from distir_relax.ops.shape import axis_of, reshape_to


def _aten(g: Any, spelling: str, *args: Any, **kwargs: Any) -> Any:
    convert = lookup_aten(spelling)
    assert convert is not None, spelling
    return convert(g, *args, **kwargs)


@aten("meshgrid.default", "meshgrid.indexing")
def _meshgrid(g: Any, tensors: list[Any], *, indexing: str = "ij") -> Any:
    """With ``xy`` the first two dims of the results change places."""
    count = len(tensors)
    homes = list(range(count))
    if indexing == "xy" and count > 1:
        homes[:2] = [1, 0]
    shape = tuple(tensors[homes.index(d)].type.elements for d in range(count))
    return tuple(
        spread_to(g, reshape_to(g, x, tuple(n if d == home else 1 for d, n in enumerate(shape))), shape)
        for x, home in zip(tensors, homes, strict=True)
    )


@aten("tile.default")
def _tile(g: Any, x: Any, times: list[int]) -> Any:
    return _aten(g, "repeat.default", x, [1] * (len(x.type.shape) - len(times)) + list(times))


@aten("swapaxes.default", "swapdims.default")
def _swapaxes(g: Any, x: Any, a: int, b: int) -> Any:
    return _aten(g, "transpose.int", x, a, b)


@aten("mT.default", "adjoint.default")
def _matrix_transpose(g: Any, x: Any) -> Any:
    return _aten(g, "transpose.int", x, -1, -2)


@aten("slice_scatter.default")
def _slice_scatter(
    g: Any, x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """The part of `x` that a slice reads, replaced: elements before it, the source, elements behind it."""
    axis = axis_of(dim, len(x.type.shape))
    size = x.type.shape[axis]
    first, last, _ = slice(start, end, step).indices(size)
    if step != 1:
        raise NotImplementedError(f"writing to every {step}th element")
    parts = [_aten(g, "slice.Tensor", x, axis, 0, first), source, _aten(g, "slice.Tensor", x, axis, max(first, last))]
    kept = [part for part in parts if part.type.shape[axis]]
    return g.emit("concat", *promote(g, *kept), axis=axis) if len(kept) > 1 else kept[0]


@aten("select_scatter.default")
def _select_scatter(g: Any, x: Any, source: Any, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    first = axis_of(index, x.type.shape[axis])
    return _slice_scatter(g, x, _aten(g, "unsqueeze.default", source, axis), axis, first, first + 1)


@aten("take_along_dim.default")
def _take_along(g: Any, x: Any, ids: Any, dim: int | None = None) -> Any:
    """As `gather`, where the index and the data broadcast to each other but along the dim."""
    if dim is None:
        return _aten(g, "gather.default", _flat(g, x), 0, _flat(g, ids))
    axis = axis_of(dim, len(x.type.shape))
    both = [max(n, m) for n, m in zip(x.type.shape, ids.type.shape, strict=True)]
    x, ids = (
        spread_to(g, t, tuple(t.type.shape[axis] if d == axis else n for d, n in enumerate(both))) for t in (x, ids)
    )
    return _aten(g, "gather.default", x, axis, ids)


def _flat(g: Any, x: Any) -> Any:
    return reshape_to(g, x, (x.type.elements,))


@aten("pixel_unshuffle.default")
def _pixel_unshuffle(g: Any, x: Any, factor: int) -> Any:
    *lead, c, h, w = x.type.shape
    opened = reshape_to(g, x, (*lead, c, h // factor, factor, w // factor, factor))
    n = len(lead)
    moved = g.emit("permute_dims", opened, axes=(*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return reshape_to(g, moved, (*lead, c * factor**2, h // factor, w // factor))


@aten("unfold.default")
def _unfold(g: Any, x: Any, dim: int, size: int, step: int) -> Any:
    """Overlapping stretches of a dim, in a new last dim: a look-up by known positions."""
    import torch

    axis, rank = axis_of(dim, len(x.type.shape)), len(x.type.shape)
    starts = torch.arange(0, x.type.shape[axis] - size + 1, step)
    places = (starts[:, None] + torch.arange(size)).reshape(-1)
    y = g.emit("take", x, g.array(places, "positions"), axis=axis)
    y = reshape_to(g, y, (*x.type.shape[:axis], len(starts), size, *x.type.shape[axis + 1 :]))
    order = (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1)
    return _aten(g, "permute.default", y, list(order))
