"""Resizing to any size: ``image.resize2d`` and ``image.resize3d``, nearest, linear and cubic.

The attributes are Relax's: `size` per spatial dim, `method`, and the mapping of result positions to operand positions,
`coordinate_transformation_mode`: ``half_pixel`` (torch's ``align_corners=False``) or ``align_corners`` for
``linear`` and ``cubic``, ``asymmetric`` for ``nearest_neighbor``. The data is ``N C spatial``.

A spatial dim that changes its size is split with halos (`SampledWindow`); batch and channels split freely.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import ALIGN_CORNERS, ASYMMETRIC, HALF_PIXEL, Resizing
from distir_relax.ops.spatial.computed_windows import keeps, local_size, over_parts, sampled_windows, set_part
from distir_relax.ops.spatial.separable_gradients import separable_gradient
from distir_relax.ops.spatial.strides import channels_first, per_dim
from distir_relax.ops.spatial.window_ops import define_spatial
from distir_relax.ops.table import Attrs, Builder, SampledWindow, Types, flops_per_result, operands, relax, reshape_to

_MODES = {
    **{("nearest_neighbor", ASYMMETRIC, n): "nearest" for n in (2, 3)},
    **{("linear", place, 2): "bilinear" for place in (HALF_PIXEL, ALIGN_CORNERS)},
    **{("linear", place, 3): "trilinear" for place in (HALF_PIXEL, ALIGN_CORNERS)},
    **{("cubic", place, 2): "bicubic" for place in (HALF_PIXEL, ALIGN_CORNERS)},
}


def resize(g: Builder, x: Value, size: tuple[int, ...], method: str, place: str) -> Any:
    """Emit the resizing of the spatial dims of `x` to `size`; a second dim is inserted temporarily if there is one."""
    if len(size) == 1:
        y = resize(g, reshape_to(g, x, (*x.tensor.shape[:2], 1, x.tensor.shape[2])), (1, *size), method, place)
        return reshape_to(g, y, (*x.tensor.shape[:2], *size))
    return g.emit(f"image.resize{len(size)}d", x, size=size, method=method, coordinate_transformation_mode=place)


def _mode(attrs: Attrs) -> tuple[str, str, int]:
    return attrs["method"], attrs["coordinate_transformation_mode"], len(attrs["size"])


def _windows(types: Types, attrs: Attrs) -> tuple[SampledWindow, ...]:
    size = attrs["size"]
    if _mode(attrs) not in _MODES:
        raise ValueError(f"expected one of {sorted({key[:2] for key in _MODES if key[2] == len(size)})}")
    sampling = Resizing(attrs["method"], attrs["coordinate_transformation_mode"])
    axes = range(2, len(types[0].shape))
    return sampled_windows(types[0], attrs, axes, size, [sampling] * len(size), keeps(types, size))


def _over_parts(attrs: Attrs) -> tuple[str, bool]:
    sampling = f"resample.Resizing({attrs['method']!r}, {attrs['coordinate_transformation_mode']!r})"
    return over_parts(attrs, "weigh", sampling, attrs["size"])


def _torch_resize(attrs: Attrs) -> str:
    text, is_all = _over_parts(attrs)
    if is_all:
        return text
    aligned = f", align_corners={attrs['coordinate_transformation_mode'] == ALIGN_CORNERS}"
    mode = _MODES[_mode(attrs)]
    return f'F.interpolate({text}, {{size}}, mode="{mode}"{aligned if mode != "nearest" else ""})'


def _relax_resize(attrs: Attrs) -> str:
    text, is_all = _over_parts(attrs)
    if is_all:
        return text
    place, size = attrs["coordinate_transformation_mode"], list(attrs["size"])
    one = [i for i, n in enumerate(size) if n == 1] if place == ALIGN_CORNERS else []
    # TVM divides by size - 1, so size 1 is computed as the first of two elements, with aligned corners.
    computed = tuple(2 if i in one else n for i, n in enumerate(size))
    text = (
        f"R.image.resize{len(size)}d({text}, {computed!r}, layout={'NCDHW' if len(size) == 3 else 'NCHW'!r}, "
        f'method={{method}}, coordinate_transformation_mode={place!r}, rounding_method="floor")'
    )
    for i in one:
        text = f"R.strided_slice({text}, ({i + 2},), (0,), (1,))"
    return text


for _n in (2, 3):
    define_spatial(
        f"image.resize{_n}d",
        _n,
        _windows,
        torch=_torch_resize,
        relax=_relax_resize,
        linear=(operands(0),),
        localize=local_size("size"),
        windowed=set_part(_n),
        flops=flops_per_result(8.0),
        gradient=separable_gradient("size"),
    )


# Relax spellings


def _relax_resize_of(count: int) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        if attrs["out_dtype"] not in (None, "", "void", args[0].tensor.dtype):
            raise NotImplementedError(f"resizing {args[0].tensor.dtype} to {attrs['out_dtype']}")
        method, place = attrs["method"], attrs["coordinate_transformation_mode"]
        if method == "nearest_neighbor" and attrs["rounding_method"] != "floor":
            raise NotImplementedError(f"resizing to the nearest element, rounded by {attrs['rounding_method']!r}")
        if method == "cubic" and (attrs["cubic_alpha"] != -0.75 or attrs["cubic_exclude"]):
            raise NotImplementedError("cubic resizing with other than -0.75 as coefficient, or without the edges")
        if (method, place, count) not in _MODES:
            raise NotImplementedError(f"resizing by {method!r}, {place!r}")
        size = per_dim(args[1], count)
        return channels_first(g, args[0], attrs["layout"], None, count, lambda x: resize(g, x, size, method, place))

    relax(f"relax.image.resize{count}d")(convert)


for _n in (2, 3):
    _relax_resize_of(_n)
