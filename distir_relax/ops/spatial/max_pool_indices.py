"""Indices of the maxima of max pooling and adaptive max pooling.

An index is the sum of the element's position along each spatial dim times `plane`. Of equal elements it is the first
in the plane. Positions count through the whole plane, so a device must know the offset of its part of each dim
(`distir_relax.ops.spatial.computed_windows`); it fetches the same halos as the pooling itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import Adaptive, Pooling, Sampling, taps_of
from distir_relax.ops.spatial.computed_windows import local_size, parts_of, sampled_windows, set_part
from distir_relax.ops.spatial.pooling import emit_pooling, max_pool
from distir_relax.ops.spatial.strides import onnx_windows, row_major, strided_windows
from distir_relax.ops.spatial.window_ops import define_spatial
from distir_relax.ops.table import (
    NO_GRADIENT,
    Attrs,
    Builder,
    OnnxOperands,
    SampledWindow,
    StridedWindow,
    Types,
    aten,
    broadcast_to,
    flops_per_operand,
    onnx,
    reshape_to,
)


def _pooling(attrs: Attrs) -> list[Pooling]:
    count = len(attrs["pool_size"])
    return [
        Pooling(*numbers)
        for numbers in zip(
            attrs["pool_size"], attrs["strides"], attrs["dilation"], attrs["padding"][:count], strict=True
        )
    ]


def _windows_of(types: Types, attrs: Attrs, samplings: Sequence[Sampling]) -> tuple[SampledWindow, ...]:
    # Even where a window is one element, a device must know its offset in the plane.
    axes = range(2, len(types[0].shape))
    return sampled_windows(types[0], attrs, axes, attrs["output_size"], samplings, [False] * len(samplings))


def _pooled_windows(types: Types, attrs: Attrs) -> tuple[SampledWindow, ...]:
    windows = _windows_of(types, attrs, _pooling(attrs))
    strided = strided_windows(types[0], attrs, attrs["pool_size"])
    for window, other, part in zip(windows, strided, parts_of(attrs, len(windows)), strict=True):
        if not part and window.result_size != other.result_size:
            raise ValueError(f"output_size {attrs['output_size']}, expected {other.result_size} along {window}")
    _reject_empty(strided, attrs)
    return windows


def _reject_empty(windows: Sequence[StridedWindow], attrs: Attrs) -> None:
    """Raise ValueError if a window contains only padding."""
    for window, sampling, part in zip(windows, _pooling(attrs), parts_of(attrs, len(windows)), strict=True):
        if not part:
            taps_of(sampling, window.size, window.result_size, False)


def _adaptive_windows(types: Types, attrs: Attrs) -> tuple[SampledWindow, ...]:
    return _windows_of(types, attrs, [Adaptive()] * len(attrs["output_size"]))


def _expression(samplings: str, attrs: Attrs) -> str:
    parts = f", {attrs['part']!r}" if any(parts_of(attrs, 0)) else ""
    return f"resample.places({{0}}, [{samplings}], {{output_size}}, {{plane}}{parts})"


def _pooling_expression(attrs: Attrs) -> str:
    return _expression(", ".join(f"resample.{sampling!r}" for sampling in _pooling(attrs)), attrs)


def _adaptive_expression(attrs: Attrs) -> str:
    return _expression(", ".join(["resample.Adaptive()"] * len(attrs["output_size"])), attrs)


def _maxima(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace: the maxima, which torch computes along with their indices."""
    return results[0].elements * (types[0].bytes / max(types[0].elements, 1))


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return float(results[0].elements * math.prod(attrs["pool_size"]))


for _n, (_name, _windows, _code, _work) in itertools.product(
    (1, 2, 3),
    (
        ("max_pool", _pooled_windows, _pooling_expression, _flops),
        ("adaptive_max_pool", _adaptive_windows, _adaptive_expression, flops_per_operand()),
    ),
):
    define_spatial(
        f"nn.{_name}{_n}d_places",
        _n,
        _windows,
        dtype="int64",
        torch=_code,
        relax=_code,
        localize=local_size("output_size"),
        windowed=set_part(_n),
        gradient=NO_GRADIENT,
        flops=_work,
        workspace=_maxima,
    )


def adaptive_places(g: Builder, x: Value, size: tuple[int, ...]) -> Any:
    """Return the row-major indices of the maxima of adaptive pooling of `x`, ``N C spatial``, to `size`."""
    return g.emit(f"nn.adaptive_max_pool{len(size)}d_places", x, output_size=size, plane=row_major(x.tensor.shape[2:]))


def _pooled_places(g: Builder, x: Value, attrs: Attrs, plane: tuple[int, ...]) -> Any:
    windows = strided_windows(x.tensor, attrs, attrs["pool_size"])
    size = tuple(window.result_size for window in windows)
    try:
        _reject_empty(windows, attrs)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None
    return g.emit(f"nn.max_pool{len(size)}d_places", x, **attrs, output_size=size, plane=plane)


# ATen spellings


def _max_with_indices(count: int) -> Any:
    def convert(
        g: Builder, x: Value, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Any:
        places: list[Any] = []

        def find(data: Value, attrs: Attrs) -> None:
            places.append(_pooled_places(g, data, attrs, row_major(data.tensor.shape[2:])))

        values = max_pool(count, find)(g, x, size, stride, padding, dilation, ceil)
        return values, reshape_to(g, places[0], values.tensor.shape)

    return convert


def _max_unpool(count: int) -> Any:
    def convert(g: Builder, x: Value, indices: Value, size: Any, *geometry: Any) -> Any:
        """Scatter the elements to their indices in a plane of zeros."""
        lead, plane = x.tensor.shape[:-count], tuple(size[-count:])
        flat = (*lead, math.prod(x.tensor.shape[-count:]))
        zeros = broadcast_to(g, g.constant(0, x.tensor.dtype), (*lead, math.prod(plane)))
        y = g.emit(
            "scatter_elements", zeros, reshape_to(g, indices, flat), reshape_to(g, x, flat),
            axis=len(lead), reduction="update",
        )  # fmt: skip
        return reshape_to(g, y, (*lead, *plane))

    return convert


for _n in (1, 2, 3):
    aten(f"max_pool{_n}d_with_indices.default")(_max_with_indices(_n))
for _n in (2, 3):
    aten(f"max_unpool{_n}d.default")(_max_unpool(_n))


# ONNX spellings


@onnx("MaxPool")
def _onnx_max_pool(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """Indices count through batch and channels too; with `storage_order` 1 the plane's first dim is the fastest."""
    import torch

    kernel = tuple(attrs["kernel_shape"])
    options: dict[str, Any] = {"pool_size": kernel, **onnx_windows(x[0], kernel, attrs)}
    ceil, planes = bool(attrs.get("ceil_mode", 0)), x[0].tensor.shape[:2]
    if attrs["outputs"] < 2:
        return emit_pooling(g, "max_pool", x[0], ceil, options)
    places: list[Any] = []
    sizes = x[0].tensor.shape[2:]
    plane = row_major(sizes[::-1])[::-1] if attrs.get("storage_order", 0) else row_major(sizes)

    def find(data: Any, full: Attrs) -> None:
        places.append(_pooled_places(g, data, full, plane))

    values = emit_pooling(g, "max_pool", x[0], ceil, options, find)
    first = torch.arange(0, math.prod(x[0].tensor.shape), math.prod(sizes)).reshape(*planes, *(1,) * len(sizes))
    return values, g.emit("add", places[0], g.array(first, "plane"))
