"""Grid sampling: ``image.grid_sample``. Positions depend on data, so every device needs the whole image."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.spatial.grid_sample_gradient import differentiate_grid_sample
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Gradient,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    define,
    flops_per_result,
    onnx,
    operands,
    parse_rule,
)

_METHODS, _PADDING = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, grid = types
    rank = len(x.shape)
    if rank != 4 or len(grid.shape) != rank or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank - 2:
        raise ValueError("expected data (n, c, h, w) and a grid (n, rows, columns, 2) of positions")
    return (TensorType((*x.shape[:2], *grid.shape[1:-1]), x.dtype),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    image = " ".join(f"[s{i}]" for i in range(len(types[0].shape) - 2))
    read = " ".join(f"r{i}" for i in range(len(types[0].shape) - 2))
    text = f"n c {image}, n {read} [xy] -> n c {read}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


define(
    "image.grid_sample",
    Semantics(
        infer=_infer,
        torch="F.grid_sample({0}, {1}, {method}, {padding_mode}, {align_corners})",
        linear=(operands(0),),
    ),
    Split(_rule),
    cost=Cost(flops=flops_per_result(8.0)),
    # Relax has the two coordinates of a position as channels.
    code=Code(
        relax="R.image.grid_sample({0}, R.permute_dims({1}, (0, 3, 1, 2)), {method}, 'NCHW', {padding_mode}, "
        "{align_corners})"
    ),
    gradient=Gradient(all=differentiate_grid_sample),
)


# ATen spellings


@aten("grid_sampler.default", "grid_sampler_2d.default")
def _grid_sampler(g: Builder, x: Value, grid: Value, method: int, padding: int, align_corners: bool) -> Any:
    return g.emit(
        "image.grid_sample",
        x,
        grid,
        method=_METHODS[method],
        padding_mode=_PADDING[padding],
        align_corners=align_corners,
    )


# ONNX spellings


@onnx("GridSample")
def _onnx_grid_sample(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    if len(x[0].tensor.shape) != 4:
        raise NotImplementedError("samples of volumes")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(attrs.get("mode", "linear"), attrs.get("mode", "linear"))
    padding, aligned = attrs.get("padding_mode", "zeros"), bool(attrs.get("align_corners", 0))
    return g.emit("image.grid_sample", x[0], x[1], method=mode, padding_mode=padding, align_corners=aligned)
