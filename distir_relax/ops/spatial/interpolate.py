"""torch's interpolation, by torch's and Relax's ops; for fractional sizes and antialiasing dim by dim (`resample`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import ALIGN_CORNERS, ASYMMETRIC, HALF_PIXEL, NEAREST, Resizing
from distir_relax.ops.spatial.resample import sampling_attrs
from distir_relax.ops.spatial.resize import resize
from distir_relax.ops.spatial.upsample import upsample_nearest
from distir_relax.ops.table import Builder, aten

# ATen spellings


def _smooth(method: str) -> Any:
    def convert(g: Builder, x: Value, size: Any, align: bool, scales: Any = None) -> Any:
        sizes, exact = _sizes(x, size, scales)
        if exact and not align:
            return _by_dims(g, x, sizes, exact, method, HALF_PIXEL)
        return resize(g, x, sizes, method, ALIGN_CORNERS if align else HALF_PIXEL)

    return convert


def _antialiased(method: str) -> Any:
    def convert(g: Builder, x: Value, size: Any, align: bool, scales: Any = None) -> Any:
        sizes, exact = _sizes(x, size, scales)
        pairs = list(zip(x.tensor.shape[2:], sizes, strict=True))
        factors = exact or [m / n for n, m in pairs]
        if align:
            # torch ignores `align_corners` here: it uses the factor of aligned corners with half-pixel positions.
            if any(1 in pair for pair in pairs):
                raise NotImplementedError("aligned corners of a dim of one element, with antialiasing")
            factors = [(m - 1) / (n - 1) for n, m in pairs]
        how = {"antialias": True, "exclude_outside": True, "cubic_coefficient": -0.5}
        return _by_dims(g, x, sizes, factors, method, HALF_PIXEL, **how)

    return convert


aten("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")(_smooth("linear"))
aten("upsample_bicubic2d.vec")(_smooth("cubic"))
aten("_upsample_bilinear2d_aa.vec")(_antialiased("linear"))
aten("_upsample_bicubic2d_aa.vec")(_antialiased("cubic"))


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(g: Builder, x: Value, size: Any = None, scales: Any = None) -> Any:
    sizes, exact = _sizes(x, size, scales)
    if exact:
        return _by_dims(g, x, sizes, exact, NEAREST, ASYMMETRIC)
    return upsample_nearest(g, x, sizes)


@aten(*(f"_upsample_nearest_exact{n}d.vec" for n in (1, 2, 3)))
def _nearest_exact(g: Builder, x: Value, size: Any = None, scales: Any = None) -> Any:
    sizes, exact = _sizes(x, size, scales)
    factors = exact or [m / n for n, m in zip(x.tensor.shape[2:], sizes, strict=True)]
    return _by_dims(g, x, sizes, factors, NEAREST, HALF_PIXEL, rounding="round_prefer_ceil")


def _sizes(x: Value, size: Any, scales: Any) -> tuple[tuple[int, ...], list[float] | None]:
    """Return the requested sizes, and the factors if they give fractional sizes."""
    if size is not None:
        return tuple(size), None
    products = [n * s for n, s in zip(x.tensor.shape[2:], scales, strict=True)]
    integral = all(n == int(n) for n in products)
    return tuple(int(n) for n in products), None if integral else list(scales)


def _by_dims(
    g: Builder, x: Value, sizes: Sequence[int], scales: Sequence[float], method: str, place: str, **how: Any
) -> Any:
    for axis, (want, scale) in enumerate(zip(sizes, scales, strict=True), start=2):
        if scale != 1:
            sampling = Resizing(method, place, float(scale), **how)
            x = g.emit("resample", x, axis=axis, size=want, **sampling_attrs(sampling))
    return x
