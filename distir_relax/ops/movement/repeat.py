"""Repetition along dims: of the whole tensor (tile) or of each element."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, onnx, relax_as_aten, reshape_to

# ATen spellings


@aten("repeat.default")
def _repeat(g: Builder, x: Value, times: list[int]) -> Any:
    own = (1,) * (len(times) - len(x.tensor.shape)) + x.tensor.shape
    opened = [n for size in own for n in (1, size)]
    spread = tuple(n for count, size in zip(times, own, strict=True) for n in (count, size))
    wide = g.aten("expand.default", reshape_to(g, x, tuple(opened)), list(spread))
    return reshape_to(g, wide, tuple(count * size for count, size in zip(times, own, strict=True)))


@aten("repeat_interleave.self_int")
def _repeat_interleave(g: Builder, x: Value, times: int, dim: int | None = None, *, output_size: Any = None) -> Any:
    if dim is None:
        x, dim = reshape_to(g, x, (x.tensor.elements,)), 0
    shape = x.tensor.shape
    axis = dim % len(shape)
    opened = reshape_to(g, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = g.aten("expand.default", opened, [*shape[: axis + 1], times, *shape[axis + 1 :]])
    return reshape_to(g, wide, (*shape[:axis], shape[axis] * times, *shape[axis + 1 :]))


@aten("tile.default")
def _tile(g: Builder, x: Value, times: list[int]) -> Any:
    return g.aten("repeat.default", x, [1] * (len(x.tensor.shape) - len(times)) + list(times))


# Relax spellings

relax_as_aten("relax.tile", "tile.default", "repeats")
relax_as_aten("relax.repeat", "repeat_interleave.self_int", "repeats", "axis")


# ONNX spellings


@onnx("Tile")
def _onnx_tile(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return g.aten("repeat.default", x[0], x.numbers(1))
