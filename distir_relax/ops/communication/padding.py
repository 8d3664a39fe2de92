"""Padding of short shards to the size of the largest, and its removal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distir_relax.ir import TensorType
from distir_relax.ops.table import (
    FREE,
    PADDING,
    Attrs,
    Code,
    Positions,
    Semantics,
    Trait,
    Types,
    chosen,
    define,
    parts_of,
    replaced,
    resized,
)


def _tail(attrs: Attrs, have: str) -> int:
    return attrs["blocks"] * attrs[have]  # type: ignore[no-any-return]


def _infer(types: Types, attrs: Attrs, have: str, want: str) -> tuple[TensorType, ...]:
    """The code takes dims and sizes from the attributes: they are those of the operand."""
    shape, dim = types[0].shape, attrs["dim"]
    if attrs.get("rank", len(shape)) != len(shape) or not 0 <= dim < len(shape) or shape[dim] != _tail(attrs, have):
        raise ValueError(f"the attributes are not those of the shape {shape}")
    return (resized(types[0], dim, _tail(attrs, want)),)


def _torch_pad(attrs: Attrs) -> str:
    rank, dim, blocks, size = attrs["rank"], attrs["dim"], attrs["blocks"], attrs["size"]
    widths = (0, 0) * (rank - 1 - dim) + (0, attrs["padded"] - size)
    inner = "{0}" if blocks == 1 else f"{{0}}.unflatten({dim}, ({blocks}, {size}))"
    padded = f"F.pad({inner}, {widths}, value={{value}})"
    return padded if blocks == 1 else f"{padded}.flatten({dim}, {dim + 1})"


def _torch_trim(attrs: Attrs) -> str:
    dim, blocks = attrs["dim"], attrs["blocks"]
    if blocks == 1:
        return f"{{0}}[{':, ' * dim}:{attrs['size']}]"
    narrowed = f"{{0}}.unflatten({dim}, ({blocks}, {attrs['padded']}))[{':, ' * (dim + 1)}:{attrs['size']}]"
    return f"{narrowed}.flatten({dim}, {dim + 1})"


def _relax_tail(attrs: Attrs, pad: bool) -> str:
    shape, dim, blocks = tuple(attrs["shape"]), attrs["dim"], attrs["blocks"]
    have, want = (attrs["size"], attrs["padded"]) if pad else (attrs["padded"], attrs["size"])
    if pad and (blocks == 1 or have == 0):
        # R.reshape interprets a dim of 0 as "unchanged", so an empty shard is padded directly.
        widths = [0, 0] * dim + [0, blocks * (want - have)] + [0, 0] * (len(shape) - dim - 1)
        return f'R.nn.pad({{0}}, {widths!r}, "constant", {{value}})'
    opened = f"R.reshape({{0}}, {(*shape[:dim], blocks, have, *shape[dim + 1 :])!r})"
    if pad:
        widths = [0, 0] * (dim + 1) + [0, want - have] + [0, 0] * (len(shape) - dim - 1)
        changed = f'R.nn.pad({opened}, {widths!r}, "constant", {{value}})'
    else:
        changed = f"R.strided_slice({opened}, ({dim + 1},), (0,), ({want},))"
    return f"R.reshape({changed}, {(*shape[:dim], blocks * want, *shape[dim + 1 :])!r})"


def _padded(parts: Sequence[Positions], attrs: Attrs) -> list[Positions]:
    dim, tail = attrs["dim"], np.full(attrs["padded"] - attrs["size"], PADDING)
    blocks = parts_of(parts[0], dim, (attrs["size"],) * attrs["blocks"])
    return [replaced(parts[0], dim, np.concatenate([x for block in blocks for x in (block[dim], tail)]))]


def _trimmed(parts: Sequence[Positions], attrs: Attrs) -> list[Positions]:
    starts = [block * attrs["padded"] for block in range(attrs["blocks"])]
    return [chosen(parts[0], attrs["dim"], [(start, start + attrs["size"]) for start in starts])]


define(
    "pad_tail",
    Semantics(infer=lambda types, attrs: _infer(types, attrs, "size", "padded"), torch=_torch_pad, moved=_padded),
    cost=FREE,
    code=Code(relax=lambda attrs: _relax_tail(attrs, pad=True)),
    traits={Trait.TRIVIAL},
)
define(
    "trim_tail",
    Semantics(infer=lambda types, attrs: _infer(types, attrs, "padded", "size"), torch=_torch_trim, moved=_trimmed),
    cost=FREE,
    code=Code(relax=lambda attrs: _relax_tail(attrs, pad=False)),
    traits={Trait.TRIVIAL},
)
