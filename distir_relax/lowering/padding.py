"""Padding of short shards.

``ragged``  every device computes on its own shapes; nothing is padded.
``pad``     short shards are padded to the size of the largest, so that all devices run the same body; only devices with
            short shards run `pad_tail`, and `trim_tail` before a shard leaves them.

Padding must not change results. A reduction over a split dim needs neutral padding (0 for a sum), so the value of the
padding is tracked from op to op: zeros stay zeros through linear ops, and known numbers stay known through element-wise
ops. If it is not known to be neutral, the shard is padded again before the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.errors import RunError
from distir_relax.ir import DTensorType, Op, PlacedType, Untyped, Value
from distir_relax.layout import Partial, Placement, Shard, maximum
from distir_relax.lowering.distributed_builder import SpmdBuilder
from distir_relax.ops import Trait, evaluate, lookup, number_range

MODES = ("ragged", "pad")

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(slots=True)
class Padding:
    """The padding mode, and the known values of padding.

    `pad_values[value, axis]` is the number in the padding of a local value along a mesh axis, None if unknown.
    """

    mode: str
    pad_values: dict[tuple[str, int], float | None] = field(default_factory=dict)

    def size(self, placement: Shard) -> tuple[int, ...]:
        """Return the size of the split dim on each index along the axis."""
        assert placement.cut is not None
        sizes = placement.cut.local_sizes()
        return sizes if self.mode == "ragged" else (maximum(*sizes),) * len(sizes)

    def pad(self, builder: SpmdBuilder, value: Value, axis: int, placement: Shard, number: float = 0.0) -> Value:
        """Pad short shards of `value` with `number`; return it unchanged if there are none."""
        return self._resize(builder, "pad_tail", value, axis, placement, number)

    def trim(self, builder: SpmdBuilder, value: Value, axis: int, placement: Shard) -> Value:
        """Remove the padding of `value` along one axis."""
        return self._resize(builder, "trim_tail", value, axis, placement, 0.0)

    def trim_all(
        self, builder: SpmdBuilder, value: Value, placements: Sequence[Placement], axes: set[int], dims: set[int]
    ) -> Value:
        """Remove the padding of `value`, with layout `placements`, along mesh axes `axes` and in tensor dims `dims`."""
        for axis, placement in self._padded(placements, axes, dims):
            value = self.trim(builder, value, axis, placement)
        return value

    def pad_all(
        self, builder: SpmdBuilder, value: Value, placements: Sequence[Placement], axes: set[int], dims: set[int]
    ) -> Value:
        """Pad with zeros: the inverse of `trim_all`."""
        for axis, placement in self._padded(placements, axes, dims):
            value = self.pad(builder, value, axis, placement)
        return value

    @staticmethod
    def _padded(placements: Sequence[Placement], axes: set[int], dims: set[int]) -> list[tuple[int, Shard]]:
        return [
            (axis, p)
            for axis, p in enumerate(placements)
            if isinstance(p, Shard) and (axis in axes or p.dim in dims) and is_padded(placements, axis)
        ]

    def _resize(
        self, builder: SpmdBuilder, name: str, value: Value, axis: int, placement: Shard, number: float
    ) -> Value:
        assert placement.cut is not None
        (segment,) = placement.cut.segments
        if self.mode == "ragged" or len(set(segment.sizes)) == 1:
            return value
        kind = value.placed
        result = builder.one(
            name,
            value,
            dim=placement.dim,
            blocks=segment.repeat,
            size=builder.expand_by_index(axis, segment.sizes),
            padded=maximum(*segment.sizes),
            value=_number(number, kind),
            rank=len(kind.shape),
            shape=kind.shape,
        )
        if name == "pad_tail":
            self.pad_values[result.name, axis] = number
        return result

    def refill(self, builder: SpmdBuilder, value: Value, axis: int, placement: Shard, number: float) -> Value:
        """Set the padding of `value` to `number`, such as the neutral element of a reduction over the split dim."""
        if self.pad_values.get((value.name, axis)) == number:
            return value
        trimmed = self.trim(builder, value, axis, placement)
        return self.pad(builder, trimmed, axis, placement, number)

    def propagate(self, op: Op, axis: int, operands: list[Value], results: list[Value]) -> None:
        """Determine the padding of the results; `op` is the op in the sharded stage."""
        if self.mode == "ragged":
            return
        for result, local in zip(op.results, results, strict=True):
            if _is_split(result, axis):
                self.pad_values[local.name, axis] = self._result_pad_value(op, axis, operands)

    def _result_pad_value(self, op: Op, axis: int, operands: list[Value]) -> float | None:
        entry = lookup(op.name)
        values = [self.pad_values.get((v.name, axis)) for v in operands]
        split = [_is_split(v, axis) for v in op.operands]
        if Trait.POINTWISE in entry.traits and op.operands and all(n is not None for n in values):
            return _apply(op, values)
        # Zero times a nonfinite number is not zero.
        finite = [not is_cut or (n is not None and math.isfinite(n)) for is_cut, n in zip(split, values, strict=True)]
        for group in entry.linear_sets(len(operands), op.attrs):
            if all(split[i] and values[i] == 0.0 for i in group) and all(finite):
                return 0.0
        return None

    def set_constant(self, value: Value, number: float, axes: int) -> None:
        """Record the padding of a scalar constant: it is the same number everywhere."""
        if self.mode == "ragged":
            return
        for axis in range(axes):
            self.pad_values[value.name, axis] = number


def is_padded(placements: Sequence[Placement], axis: int) -> bool:
    """Whether short shards along a mesh axis are padded in mode ``pad``.

    They are if only this axis cuts the dim, and its segments have equal sizes; other shards keep their own sizes. An
    axis of one device does not cut.
    """
    placement = placements[axis]
    if not isinstance(placement, Shard) or placement.cut is None or len(placement.cut.segments) > 1:
        return False
    others = (p for i, p in enumerate(placements) if i != axis and isinstance(p, Shard) and p.dim == placement.dim)
    return placement.cut.ranks > 1 and all(p.cut is not None and p.cut.ranks == 1 for p in others)


def _apply(op: Op, numbers: list[float | None]) -> float | None:
    import torch

    dtypes = [v.type.dtype for v in op.operands if not isinstance(v.type, Untyped)]
    tensors = [torch.tensor(n, dtype=getattr(torch, d)) for n, d in zip(numbers, dtypes, strict=True)]
    try:
        result = float(evaluate(op, tensors)[0])
    except RunError:
        return None  # integer division by zero: the model would raise an error here, and so will its ranks
    return None if math.isnan(result) else result


def _number(number: float, kind: PlacedType) -> float | int:
    """Convert a number to the value's dtype, clamped to its range."""
    low, high = number_range(kind.dtype)
    return number if "float" in kind.dtype else int(min(max(number, low), high))


def _is_split(value: Value, axis: int) -> bool:
    kind = value.type
    return isinstance(kind, DTensorType) and isinstance(kind.placements[axis], Shard)


def is_partial(value: Value, axis: int) -> bool:
    """Whether a value of the sharded stage is a partial sum along a mesh axis."""
    kind = value.type
    return isinstance(kind, DTensorType) and isinstance(kind.placements[axis], Partial)
