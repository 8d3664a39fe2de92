"""Upsampling by whole factors, each element repeated: a transposed window whose kernel is its stride."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.interpolate import ALIGN_CORNERS, ASYMMETRIC, HALF_PIXEL, resize, wanted_size
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, operands
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to
from distir_relax.ops.sliding import SCATTER, Window
from distir_relax.ops.window import (
    ends,
    set_padding,
    spatial,
    spatial_names,
    torch_widths,
    window_sizes,
    windows_of,
    with_windows,
)


def _windows(types: Types, attrs: Attrs) -> tuple[Window, ...]:
    return windows_of(types[0], attrs, attrs["strides"], SCATTER)


def _infer_upsample(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len(types[0].shape) != spatial(attrs) + 2 or len(attrs["strides"]) != spatial(attrs):
        raise ValueError(f"a tensor of {spatial(attrs) + 2} dims, and a stride for each spatial dim")
    return (TensorType((*types[0].shape[:2], *window_sizes(_windows(types, attrs))), types[0].dtype),)


def _upsample_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    windows = _windows(types, attrs)
    text = f"n c {spatial_names(windows)}"
    return with_windows(parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape]), windows)


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


define(
    "nn.upsample_nearest",
    infer=_infer_upsample,
    rule=_upsample_rule,
    torch=_torch_upsample,
    relax=_relax_upsample,
    linear=(operands(0),),
    padded=set_padding,
    zero_if_empty=True,
    flops=lambda types, attrs, results: 0.0,
)


# ATen spellings


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _upsample_nearest(g: Any, x: Any, size: Any = None, scales: Any = None) -> Any:
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


# ONNX spellings

# How a result's position is taken back to the operand's, with the rounding: those that repeat each element in turn.
_REPEATS = {
    *((place, f"round_prefer_{way}") for place in ("half_pixel", "pytorch_half_pixel") for way in ("floor", "ceil")),
    ("asymmetric", "floor"),
}


@onnx_spelling("Resize", "Upsample")
def _onnx_resize(g: Any, x: Any, attrs: Any) -> Any:
    """Resizing by whole factors to the nearest element."""
    old = attrs["opset"] < 11
    place = attrs.get("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    rounding = attrs.get("nearest_mode", "floor" if old else "round_prefer_floor")
    mode = attrs.get("mode", "nearest")
    smooth = mode in ("linear", "cubic") and place in (HALF_PIXEL, "pytorch_half_pixel", ALIGN_CORNERS)
    plain = (
        not attrs.get("antialias") and attrs.get("cubic_coeff_a", -0.75) == -0.75 and not attrs.get("exclude_outside")
    )
    if not (smooth and plain) and (mode != "nearest" or (place, rounding) not in _REPEATS):
        raise NotImplementedError(f"resizing of mode {attrs.get('mode', 'nearest')!r}, {place!r}, {rounding!r}")
    have, rank = x[0].type.shape, len(x[0].type.shape)
    axes = [a % rank for a in attrs.get("axes", range(rank))]
    sizes = x.numbers(3) if not old else None
    if not sizes:
        scales = attrs.get("scales") or x.numbers(1 if old else 2)
        sizes = [have[a] * scale for a, scale in zip(axes, scales, strict=True)]
    wanted = list(have)
    for axis, size in zip(axes, sizes, strict=True):
        wanted[axis] = int(size)
        if size != int(size):
            raise NotImplementedError("resizing by other than whole factors")
    if tuple(wanted[:2]) != have[:2] or attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NotImplementedError("resizing of batch or channels, or to an aspect ratio")
    if tuple(wanted) == have:
        return x[0]
    if not smooth:
        if any(m % n for n, m in zip(have, wanted, strict=True)):
            raise NotImplementedError(f"resizing {have} to {tuple(wanted)} by the nearest element")
        return _upsample_nearest(g, x[0], wanted[2:])
    if len(have) > (4 if mode == "cubic" else 5) or (place == "pytorch_half_pixel" and 1 in wanted[2:]):
        raise NotImplementedError(f"resizing of mode {mode!r}, {place!r} to {tuple(wanted)}")
    return resize(g, x[0], tuple(wanted[2:]), mode, ALIGN_CORNERS if place == ALIGN_CORNERS else HALF_PIXEL)
