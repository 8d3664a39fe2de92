"""Cost of an op on a device: a roofline over its entry's counts, with slower matrix products for small sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.cost.profile import Matrix, Profile
from distir_relax.ir import TensorType
from distir_relax.ops import OpDef, Trait
from distir_relax.ops.table.entry import typical_costs

FLOPS_PER_BYTE = 100.0
"""Operations in the time of sending a byte, for decisions without a machine: about 20 for two processes of a CPU,
300 and more for GPUs on fast links. Only the order of magnitude matters: it decides between recompute and
communication."""


def op_seconds(
    profile: Profile,
    entry: OpDef,
    operands: Sequence[TensorType],
    attrs: Mapping[str, Any],
    results: Sequence[TensorType],
    fixed: bool = False,
    cold: Sequence[bool] = (),
    speed: float = 1.0,
) -> float:
    """Return the seconds of an op that does not communicate, on local operands.

    `fixed`: the op's weight is constant, so that a backend may pack it once, or view it once. `cold` is whether each
    operand, and after them each result, is outside of all caches; none if empty. Compute and memory rates are `speed`
    times those of the profile; host overhead per op is not scaled.
    """
    cost = entry.cost
    operands, attrs, results = typical_costs(operands, attrs, results)
    if cost.seconds:
        return cost.seconds(operands, attrs, results) / speed
    if Trait.VIEW in entry.traits:
        return 0.0 if fixed else profile.view * len(results)
    if Trait.SCALAR in entry.traits:
        return 0.0
    moved = moved_bytes(entry, operands, attrs, results)
    dtype = operands[0].dtype if operands else results[0].dtype
    compute, bandwidth = 0.0, profile.bandwidth
    rate = profile.ops.get(dtype, {}).get(entry.name)
    if rate:
        compute = flops(entry, operands, attrs, results) / rate
    elif cost.product:
        packed = fixed and bool(entry.code.packed) and dtype in profile.packed
        matrix: Matrix = profile.packed[dtype] if packed else profile.rate(profile.matrix, dtype)
        compute = matrix.seconds(*cost.product(operands, attrs, results))
        bandwidth = matrix.bandwidth or bandwidth
    else:
        compute = flops(entry, operands, attrs, results) / profile.rate(profile.vector, dtype)
    memory = _memory_seconds(profile, bandwidth, moved, (*operands, *results), cold)
    return max(profile.dispatch, profile.overhead + _combine(compute, memory, profile.overlap) / speed)


def _memory_seconds(
    profile: Profile, bandwidth: float, moved: float, tensors: Sequence[TensorType], cold: Sequence[bool]
) -> float:
    """Return the seconds to move `moved` bytes of `tensors`; those outside of all caches at `bandwidth`."""
    cold_bytes = sum(t.bytes for t, is_cold in zip(tensors, cold, strict=False) if is_cold)
    if not cold_bytes:
        return moved / memory_bandwidth(profile, moved)
    uncached = moved * cold_bytes / sum(t.bytes for t in tensors)
    cached = moved - uncached
    return uncached / bandwidth + cached / memory_bandwidth(profile, cached)


def _combine(compute: float, memory: float, overlap: float) -> float:
    """Combine compute and memory time: see `Profile.overlap`."""
    longer = max(compute, memory)
    if math.isinf(overlap) or not longer:
        return longer
    return float(longer * (1.0 + (min(compute, memory) / longer) ** overlap) ** (1.0 / overlap))


def flops(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    """Return the floating-point operations of an op, for typical values of symbolic sizes."""
    operands, attrs, results = typical_costs(operands, attrs, results)
    if entry.cost.flops:
        return entry.cost.flops(operands, attrs, results)
    return float(sum(t.elements for t in results))


def moved_bytes(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    """Return the bytes that an op reads and writes, for typical values of symbolic sizes."""
    operands, attrs, results = typical_costs(operands, attrs, results)
    if entry.cost.moved:
        return entry.cost.moved(operands, attrs, results)
    return float(sum(t.bytes for t in operands) + sum(t.bytes for t in results))


def memory_bandwidth(profile: Profile, moved: float) -> float:
    """Return the bandwidth for `moved` bytes read and written: that of the cache if they fit."""
    return profile.cache_bandwidth if profile.cache and moved <= profile.cache else profile.bandwidth
