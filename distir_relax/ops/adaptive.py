"""Adaptive pooling, whose windows follow from the sizes, and where in the plane a window's largest element stands.

Of `n` elements pooled to `m`, window `i` begins at ``floor(i n / m)`` and ends before ``ceil((i + 1) n / m)``. Windows
of one size are ordinary pooling, split with halos (`distir_relax.ops.pooling`); a dim of unequal windows is gathered.

Places of maxima are found dim by dim, the last one first, so that of equal elements the first in the plane is found.
They count through the whole plane, so the dims that they are found along are looked at in whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.interpolate import local_size, sized_rule
from distir_relax.ops.pooling import adaptive_average, max_pool, pooled
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, operands, relax_spelling
from distir_relax.ops.scatter import spread_to
from distir_relax.ops.shape import reshape_to
from distir_relax.ops.window import batched, need_layout, onnx_windows, per_dim, windows_of

Windows = Sequence[Sequence[int]]
"""For each element of a result dim, the positions in the operand's dim that it is made from, in order."""


def _infer_adaptive(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, size = types[0], attrs["output_size"]
    if len(x.shape) != len(size) + 2 or "float" not in x.dtype:
        raise ValueError(f"floats of {len(size) + 2} dims")
    return (TensorType((*x.shape[:2], *size), x.dtype),)


for _n in (1, 2, 3):
    define(
        f"nn.adaptive_avg_pool{_n}d",
        infer=_infer_adaptive,
        rule=sized_rule,
        torch=f"F.adaptive_avg_pool{_n}d({{0}}, {{output_size}})",
        relax=f"R.nn.adaptive_avg_pool{_n}d({{0}}, {{output_size}})",
        linear=(operands(0),),
        localize=local_size("output_size"),
        zero_if_empty=True,
        flops=lambda types, attrs, results: float(types[0].elements),
    )


# Windows as positions


def _adaptive_windows(have: int, want: int) -> Windows:
    return [range(i * have // want, -(-(i + 1) * have // want)) for i in range(want)]


def _pool_windows(x: Any, attrs: Attrs) -> list[Windows]:
    found: list[Windows] = []
    for w in windows_of(x.type, attrs, attrs["pool_size"]):
        places = [[o * w.stride - w.low + w.dilation * j for j in range(w.kernel)] for o in range(w.result_size)]
        found.append([[p for p in row if 0 <= p < w.size] for row in places])
    if any(not row for windows in found for row in windows):
        raise NotImplementedError("a window of padding alone, which has no largest element")
    return found


def _opened(g: Any, x: Any, axis: int, windows: Windows) -> tuple[Any, list[int]]:
    """`x` with dim `axis` made two, windows and elements of a window; and the positions of those, one after the other.

    Shorter windows repeat their last element, which changes no maximum and not where it is first found.
    """
    import torch

    longest = max(map(len, windows))
    places = [row[min(j, len(row) - 1)] for row in windows for j in range(longest)]
    shape = x.type.shape
    y = g.emit("take", x, g.array(torch.tensor(places), "positions"), axis=axis)
    return reshape_to(g, y, (*shape[:axis], len(windows), longest, *shape[axis + 1 :])), places


def _maxima(g: Any, x: Any, windows: Sequence[Windows]) -> Any:
    for axis, rows in _last_first(x, windows):
        x = g.emit("max", _opened(g, x, axis, rows)[0], axis=(axis + 1,), keepdims=False)
    return x


def _last_first(x: Any, windows: Sequence[Windows]) -> list[tuple[int, Windows]]:
    rank = len(x.type.shape)
    return list(reversed(list(zip(range(rank - len(windows), rank), windows, strict=True))))


def _places(g: Any, x: Any, windows: Sequence[Windows], strides: Sequence[int]) -> Any:
    """Where the largest element of each window stands: the sum of its positions, times `strides`, over the last dims."""
    import torch

    found: dict[int, Any] = {}
    for axis, rows in _last_first(x, windows):
        y, places = _opened(g, x, axis, rows)
        best = g.emit("argmax", y, axis=axis + 1, keepdims=False)
        longest, after = y.type.shape[axis + 1], y.type.shape[axis + 2 :]
        first = torch.arange(0, len(places), longest).reshape(-1, *(1,) * len(after))
        position = g.emit(
            "take", g.array(torch.tensor(places), "positions"), g.emit("add", best, g.array(first, "first")), axis=0
        )
        found = {dim: g.emit("gather_elements", other, position, axis=axis) for dim, other in found.items()}
        found[axis] = position
        x = g.emit("max", y, axis=(axis + 1,), keepdims=False)
    total = None
    for dim, stride in zip(sorted(found), strides, strict=True):
        part = found[dim] if stride == 1 else g.emit("multiply", found[dim], g.constant(stride, "int64"))
        total = part if total is None else g.emit("add", total, part)
    return total


def _row_major(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


# ATen spellings


def _adaptive_average(count: int) -> Any:
    def convert(g: Any, x: Any, size: Any) -> Any:
        wanted = per_dim(size, count)
        if all(n % m == 0 for n, m in zip(x.type.shape[-count:], wanted, strict=True)):
            return adaptive_average(count)(g, x, wanted)
        return batched(g, x, count, lambda data: g.emit(f"nn.adaptive_avg_pool{count}d", data, output_size=wanted))

    return convert


def _adaptive_max(count: int) -> Any:
    def convert(g: Any, x: Any, size: Any) -> Any:
        wanted, have = per_dim(size, count), x.type.shape[-count:]
        windows = [_adaptive_windows(n, m) for n, m in zip(have, wanted, strict=True)]
        if all(n % m == 0 for n, m in zip(have, wanted, strict=True)):
            values = max_pool(count)(g, x, [n // m for n, m in zip(have, wanted, strict=True)])
        else:
            values = _maxima(g, x, windows)
        return values, _places(g, x, windows, _row_major(have))

    return convert


def _max_with_indices(count: int) -> Any:
    def convert(
        g: Any, x: Any, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Any:
        places: list[Any] = []

        def find(data: Any, attrs: Attrs) -> None:
            places.append(_places(g, data, _pool_windows(data, attrs), _row_major(data.type.shape[-count:])))

        values = max_pool(count, find)(g, x, size, stride, padding, dilation, ceil)
        return values, reshape_to(g, places[0], values.type.shape)

    return convert


def _max_unpool(count: int) -> Any:
    def convert(g: Any, x: Any, indices: Any, size: Any, *geometry: Any) -> Any:
        """Each element goes to its place in a plane of zeros."""
        lead, plane = x.type.shape[:-count], tuple(size[-count:])
        flat = (*lead, math.prod(x.type.shape[-count:]))
        zeros = spread_to(g, g.constant(0, x.type.dtype), (*lead, math.prod(plane)))
        y = g.emit(
            "scatter_elements", zeros, reshape_to(g, indices, flat), reshape_to(g, x, flat),
            axis=len(lead), reduction="update",
        )  # fmt: skip
        return reshape_to(g, y, (*lead, *plane))

    return convert


for _n in (1, 2, 3):
    aten(f"adaptive_avg_pool{_n}d.default")(_adaptive_average(_n))
    aten(f"adaptive_max_pool{_n}d.default")(_adaptive_max(_n))
    aten(f"max_pool{_n}d_with_indices.default")(_max_with_indices(_n))
for _n in (2, 3):
    aten(f"max_unpool{_n}d.default")(_max_unpool(_n))


# Relax spellings


def _relax_adaptive(count: int) -> None:
    letters = "DHW"[3 - count :] if count > 1 else "W"

    def convert(g: Any, args: Any, attrs: Any) -> Any:
        need_layout(attrs, layout="NC" + letters, out_layout="NC" + letters)
        size = attrs["output_size"]
        return args[0] if size is None else _adaptive_average(count)(g, args[0], size)

    relax_spelling(f"relax.nn.adaptive_avg_pool{count}d")(convert)


for _n in (1, 2, 3):
    _relax_adaptive(_n)


# ONNX spellings


@onnx_spelling("MaxPool")
def _onnx_max_pool(g: Any, x: Any, attrs: Any) -> Any:
    """The places count through batch and channels too; with `storage_order` 1 the first dim of the plane runs fastest."""
    import torch

    kernel = tuple(attrs["kernel_shape"])
    found: dict[str, Any] = {"pool_size": kernel, **onnx_windows(x[0], kernel, attrs)}
    ceil, planes = bool(attrs.get("ceil_mode", 0)), x[0].type.shape[:2]
    if attrs["outputs"] < 2:
        return pooled(g, "max_pool", x[0], ceil, found)
    places: list[Any] = []
    sizes = x[0].type.shape[2:]
    strides = _row_major(sizes[::-1])[::-1] if attrs.get("storage_order", 0) else _row_major(sizes)

    def find(data: Any, full: Attrs) -> None:
        places.append(_places(g, data, _pool_windows(data, full), strides))

    values = pooled(g, "max_pool", x[0], ceil, found, find)
    first = torch.arange(0, math.prod(x[0].type.shape), math.prod(sizes)).reshape(*planes, *(1,) * len(sizes))
    return values, g.emit("add", places[0], g.array(first, "plane"))
