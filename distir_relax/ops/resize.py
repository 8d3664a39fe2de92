"""Upsampling by whole factors, each element repeated: a transposed window whose kernel is its stride."""

from __future__ import annotations

from typing import Any

from distir_relax.ops.interpolate import resize, wanted_size
from distir_relax.ops.registry import Attrs, Types, aten, operands
from distir_relax.ops.shape import reshape_to
from distir_relax.ops.sliding import SCATTER, StridedWindow
from distir_relax.ops.spatial import define_spatial
from distir_relax.ops.window import ends, set_padding, spatial, torch_widths, windows_of
from distir_relax.runtime.sampling import ASYMMETRIC


def _windows(types: Types, attrs: Attrs) -> tuple[StridedWindow, ...]:
    if not len(attrs["strides"]) == spatial(attrs) == len(types[0].shape) - 2:
        raise ValueError(f"a tensor of {spatial(attrs) + 2} dims, and a stride for each spatial dim")
    return windows_of(types[0], attrs, attrs["strides"], SCATTER)


def _torch_upsample(attrs: Attrs) -> str:
    text = "{0}"
    for i, times in enumerate(attrs["strides"]):
        text += f".repeat_interleave({times}, {i + 2})" if times != 1 else ""
    low, high = ends(attrs)
    if any((*low, *high)):
        return f"F.pad({text}, {torch_widths([-n for n in low], [-n for n in high])!r})"
    return text


def _relax_upsample(attrs: Attrs) -> str:
    text = "{0}"
    for i, times in enumerate(attrs["strides"]):
        text = f"R.repeat({text}, {times}, {i + 2})" if times != 1 else text
    low, high = ends(attrs)
    for i, (first, last) in enumerate(zip(low, high, strict=True)):
        if first or last:
            # An end counted from the back, as a slice of Relax may have it.
            text = f"R.strided_slice({text}, ({i + 2},), ({first},), ({-last if last else 2**31 - 1},))"
    return text


define_spatial(
    "nn.upsample_nearest",
    None,
    _windows,
    floats=False,
    torch=_torch_upsample,
    relax=_relax_upsample,
    linear=(operands(0),),
    windowed=set_padding,
    flops=lambda types, attrs, results: 0.0,
)


# ATen spellings


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(g: Any, x: Any, size: Any = None, scales: Any = None) -> Any:
    """The spatial dims of `x` resized to the nearest element: repeated by whole factors where that is possible."""
    have, wanted = x.type.shape[2:], wanted_size(x, size, scales)
    if any(m % n for n, m in zip(have, wanted, strict=True)):
        return resize(g, x, wanted, "nearest_neighbor", ASYMMETRIC)
    times = tuple(m // n for n, m in zip(have, wanted, strict=True))
    return g.emit("nn.upsample_nearest", x, strides=times, padding=(0,) * 2 * len(times))


@aten("pixel_shuffle.default")
def _pixel_shuffle(g: Any, x: Any, factor: int) -> Any:
    *lead, c, h, w = x.type.shape
    opened = reshape_to(g, x, (*lead, c // factor**2, factor, factor, h, w))
    n = len(lead)
    moved = g.emit("permute_dims", opened, axes=(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return reshape_to(g, moved, (*lead, c // factor**2, h * factor, w * factor))
