"""Broadcasts along dims of size 1 or new leading dims, without a copy; repetition of tensors and of elements."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.movement import view_strides
from distir_relax.ops.movement.reshape import result_shape
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Builder,
    Code,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    broadcast_element,
    broadcast_shape,
    broadcast_to,
    define,
    dim_names,
    gradient_of,
    onnx,
    operands,
    parse_rule,
    relax_as_aten,
    reshape_to,
)


def _infer_broadcast(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = tuple(attrs["shape"])
    if len(types[0].shape) > len(shape):
        raise ValueError(f"{types[0].shape} has more dims than {shape}")
    for have, want in zip(reversed(types[0].shape), reversed(shape), strict=False):
        if have not in (1, want):
            raise ValueError(f"{types[0].shape} does not broadcast to {shape}")
    return (TensorType(shape, types[0].dtype),)


def _broadcast_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(results[0].shape))
    own = names[len(names) - len(types[0].shape) :]
    return parse_rule(f"{' '.join(own)} -> {' '.join(names)}", [types[0].shape], [results[0].shape])


define(
    "broadcast_to",
    Semantics(
        infer=_infer_broadcast,
        torch="{0}.expand({shape})",
        linear=(operands(0),),
        element=lambda elements, shapes, attrs, shape: broadcast_element(elements[0], shapes[0], shape),
    ),
    Split(_broadcast_rule, localize=result_shape),
    cost=FREE,
    code=Code(relax="R.broadcast_to({0}, {shape})", strides=view_strides.expanded),
    gradient=gradient_of("g"),
    traits={Trait.VIEW, Trait.MOVES},
)


# ATen spellings


@aten("expand.default", "broadcast_to.default")
def _expand(g: Builder, x: Value, sizes: list[int], implicit: bool = False) -> Any:
    shape = (1,) * (len(sizes) - len(x.tensor.shape)) + x.tensor.shape
    shape = tuple(have if want == -1 else want for have, want in zip(shape, sizes, strict=True))
    return x if shape == x.tensor.shape else g.emit("broadcast_to", x, shape=shape)


@aten("expand_as.default")
def _expand_as(g: Builder, x: Value, other: Value) -> Any:
    return _expand(g, x, list(other.tensor.shape))


@aten("broadcast_tensors.default")
def _broadcast_tensors(g: Builder, tensors: list[Value]) -> Any:
    shape = broadcast_shape([t.tensor for t in tensors])
    return tuple(broadcast_to(g, t, shape) for t in tensors)


@aten("repeat.default")
def _repeat(g: Builder, x: Value, times: list[int]) -> Any:
    sizes = (1,) * (len(times) - len(x.tensor.shape)) + x.tensor.shape
    opened = [n for size in sizes for n in (1, size)]
    spread = tuple(n for count, size in zip(times, sizes, strict=True) for n in (count, size))
    wide = _expand(g, reshape_to(g, x, tuple(opened)), list(spread))
    return reshape_to(g, wide, tuple(count * size for count, size in zip(times, sizes, strict=True)))


@aten("repeat_interleave.self_int")
def _repeat_interleave(g: Builder, x: Value, times: int, dim: int | None = None, *, output_size: Any = None) -> Any:
    if dim is None:
        x, dim = reshape_to(g, x, (x.tensor.elements,)), 0
    shape = x.tensor.shape
    axis = dim % len(shape)
    opened = reshape_to(g, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = _expand(g, opened, [*shape[: axis + 1], times, *shape[axis + 1 :]])
    return reshape_to(g, wide, (*shape[:axis], shape[axis] * times, *shape[axis + 1 :]))


@aten("tile.default")
def _tile(g: Builder, x: Value, times: list[int]) -> Any:
    return _repeat(g, x, [1] * (len(x.tensor.shape) - len(times)) + list(times))


# Relax spellings

relax_as_aten("relax.broadcast_to", "expand.default")
relax_as_aten("relax.tile", "tile.default", "repeats")
relax_as_aten("relax.repeat", "repeat_interleave.self_int", "repeats", "axis")


# ONNX spellings


@onnx("Expand")
def _onnx_expand(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """The requested shape and the tensor's shape broadcast to each other."""
    shape, target = list(x[0].tensor.shape), x.numbers(1)
    rank = max(len(shape), len(target))
    shape, target = [1] * (rank - len(shape)) + shape, [1] * (rank - len(target)) + target
    return _expand(g, x[0], [_joined(have, want) for have, want in zip(shape, target, strict=True)])


def _joined(have: int, want: int) -> int:
    """Return the size of a dim that two sizes broadcast to."""
    if want not in (1, have) and have != 1:
        raise NotImplementedError(f"an expansion of {have} to {want}")
    return want if have == 1 else have


@onnx("Tile")
def _onnx_tile(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _repeat(g, x[0], x.numbers(1))
