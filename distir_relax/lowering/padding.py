"""Tail blocks: what the devices with a short shard do.

``ragged``  every device works on its own shapes; nothing is ever padded.
``pad``     short shards are filled up to the largest, so that all devices run the same body; only the devices that are
            short carry a `pad_tail`, or a `trim_tail` before their shard leaves them.

Padding must not change a result. Where a split dim is reduced the filling has to be neutral (0 for a sum), so the
value of the filling is followed from op to op: zeros stay zeros through whatever is linear, and a number stays a known
number through element-wise ops. Where it is not known to be neutral, it is filled anew before the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.errors import RunError
from distir_relax.ir import DTensorType, Op, PlacedType, Untyped, Value
from distir_relax.layout import Partial, Placement, Shard
from distir_relax.lowering.distributed_builder import PlacedEmitter
from distir_relax.ops import Trait, evaluate, lookup, number_range

MODES = ("ragged", "pad")

NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(slots=True)
class Tails:
    """How tail blocks are treated, and what is known of their filling.

    `filling[value, axis]` is the number in the filling of a local value along a mesh axis, or None when unknown.
    """

    mode: str
    filling: dict[tuple[str, int], float | None] = field(default_factory=dict)

    def size(self, placement: Shard) -> tuple[int, ...]:
        """The elements of the split dim that each index along the axis works on."""
        assert placement.cut is not None
        sizes = placement.cut.local_sizes()
        return sizes if self.mode == "ragged" else (max(sizes),) * len(sizes)

    def pad(self, emitter: PlacedEmitter, value: Value, axis: int, placement: Shard, number: float = 0.0) -> Value:
        """`value` with short shards filled up with `number`; itself where there is nothing to fill."""
        return self._resize(emitter, "pad_tail", value, axis, placement, number)

    def trim(self, emitter: PlacedEmitter, value: Value, axis: int, placement: Shard) -> Value:
        """`value` without its filling along one axis."""
        return self._resize(emitter, "trim_tail", value, axis, placement, 0.0)

    def trim_all(
        self, emitter: PlacedEmitter, value: Value, placements: Sequence[Placement], axes: set[int], dims: set[int]
    ) -> Value:
        """`value`, which lies as `placements`, without its filling along mesh axes `axes` and in tensor dims `dims`."""
        for axis, placement in self._padded(placements, axes, dims):
            value = self.trim(emitter, value, axis, placement)
        return value

    def pad_all(
        self, emitter: PlacedEmitter, value: Value, placements: Sequence[Placement], axes: set[int], dims: set[int]
    ) -> Value:
        """The inverse of `trim_all`, filling with zeros."""
        for axis, placement in self._padded(placements, axes, dims):
            value = self.pad(emitter, value, axis, placement)
        return value

    @staticmethod
    def _padded(placements: Sequence[Placement], axes: set[int], dims: set[int]) -> list[tuple[int, Shard]]:
        return [
            (axis, p)
            for axis, p in enumerate(placements)
            if isinstance(p, Shard) and (axis in axes or p.dim in dims) and is_padded(placements, axis)
        ]

    def _resize(
        self, emitter: PlacedEmitter, name: str, value: Value, axis: int, placement: Shard, number: float
    ) -> Value:
        assert placement.cut is not None
        (segment,) = placement.cut.segments
        if self.mode == "ragged" or len(set(segment.sizes)) == 1:
            return value
        kind = value.placed
        result = emitter.one(
            name,
            value,
            dim=placement.dim,
            blocks=segment.repeat,
            size=emitter.by_index(axis, segment.sizes),
            padded=max(segment.sizes),
            value=_number(number, kind),
            rank=len(kind.shape),
            shape=kind.shape,
        )
        if name == "pad_tail":
            self.filling[result.name, axis] = number
        return result

    def refill(self, emitter: PlacedEmitter, value: Value, axis: int, placement: Shard, number: float) -> Value:
        """`value`, its filling made `number`: what a reduction over the split dim is indifferent to, for instance."""
        if self.filling.get((value.name, axis)) == number:
            return value
        trimmed = self.trim(emitter, value, axis, placement)
        return self.pad(emitter, trimmed, axis, placement, number)

    def follow(self, op: Op, axis: int, operands: list[Value], results: list[Value]) -> None:
        """Note what the filling of the results is; `op` is the op in the sharded stage."""
        if self.mode == "ragged":
            return
        for result, local in zip(op.results, results, strict=True):
            if _is_split(result, axis):
                self.filling[local.name, axis] = self._after(op, axis, operands)

    def _after(self, op: Op, axis: int, operands: list[Value]) -> float | None:
        entry = lookup(op.name)
        known = [self.filling.get((v.name, axis)) for v in operands]
        split = [_is_split(v, axis) for v in op.operands]
        if Trait.POINTWISE in entry.traits and op.operands and all(n is not None for n in known):
            return _apply(op, known)
        # Zero times what is not finite is not zero.
        finite = [not cut or (n is not None and math.isfinite(n)) for cut, n in zip(split, known, strict=True)]
        for group in entry.linear_sets(len(operands), op.attrs):
            if all(split[i] and known[i] == 0.0 for i in group) and all(finite):
                return 0.0
        return None

    def note_constant(self, value: Value, number: float, axes: int) -> None:
        """A scalar constant is the same number everywhere, also beside a filling."""
        if self.mode == "ragged":
            return
        for axis in range(axes):
            self.filling[value.name, axis] = number


def is_padded(placements: Sequence[Placement], axis: int) -> bool:
    """Whether short shards along a mesh axis are filled up in mode ``pad``.

    They are where the axis alone cuts its dim, into stretches of the same sizes; other shards keep their own sizes. An
    axis of one device cuts nothing.
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
        return None  # an integer by zero: what the model divides by zero, its ranks will complain of
    return None if math.isnan(result) else result


def _number(number: float, kind: PlacedType) -> float | int:
    """The number in the value's dtype, an infinity as the last number that it has."""
    least, most = number_range(kind.dtype)
    return number if "float" in kind.dtype else int(min(max(number, least), most))


def _is_split(value: Value, axis: int) -> bool:
    kind = value.type
    return isinstance(kind, DTensorType) and isinstance(kind.placements[axis], Shard)


def is_pending(value: Value, axis: int) -> bool:
    """Whether a value of the sharded stage waits for a reduction along a mesh axis."""
    kind = value.type
    return isinstance(kind, DTensorType) and isinstance(kind.placements[axis], Partial)
