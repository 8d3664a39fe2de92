"""Upsampling by whole factors, each element repeated: a transposed window whose kernel is its stride."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.interpolate import ASYMMETRIC, resize, wanted_size
from distir_relax.ops.registry import Attrs, Types, aten, define, operands
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
