"""Pixel shuffle and unshuffle: channels to spatial positions, and back."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, onnx, reshape_to

# ATen spellings


@aten("pixel_shuffle.default")
def _pixel_shuffle(g: Builder, x: Value, factor: int) -> Any:
    *lead, c, h, w = x.tensor.shape
    opened = reshape_to(g, x, (*lead, c // factor**2, factor, factor, h, w))
    n = len(lead)
    moved = g.emit("permute_dims", opened, axes=(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return reshape_to(g, moved, (*lead, c // factor**2, h * factor, w * factor))


@aten("pixel_unshuffle.default")
def _pixel_unshuffle(g: Builder, x: Value, factor: int) -> Any:
    *lead, c, h, w = x.tensor.shape
    opened = reshape_to(g, x, (*lead, c, h // factor, factor, w // factor, factor))
    n = len(lead)
    moved = g.emit("permute_dims", opened, axes=(*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return reshape_to(g, moved, (*lead, c * factor**2, h // factor, w // factor))


# ONNX spellings


@onnx("DepthToSpace")
def _onnx_depth_to_space(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    n, c, h, w = x[0].tensor.shape
    b = attrs["blocksize"]
    if attrs.get("mode", "DCR") == "DCR":
        opened, axes = (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        opened, axes = (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3)
    y = g.emit("permute_dims", reshape_to(g, x[0], opened), axes=axes)
    return reshape_to(g, y, (n, c // b**2, h * b, w * b))


@onnx("SpaceToDepth")
def _onnx_space_to_depth(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    n, c, h, w = x[0].tensor.shape
    b = attrs["blocksize"]
    axes = (0, 3, 5, 1, 2, 4) if attrs.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    y = g.emit("permute_dims", reshape_to(g, x[0], (n, c, h // b, b, w // b, b)), axes=axes)
    return reshape_to(g, y, (n, c * b**2, h // b, w // b))
