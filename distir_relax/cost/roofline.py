"""How long an op takes on a device: a roofline over what its entry says of it, with slower matrix products for small
sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.cost.profile import Matrix, Profile
from distir_relax.ir import TensorType
from distir_relax.ops import OpDef, Trait

FLOPS_PER_BYTE = 100.0
"""How many operations a device does in the time it takes to send a byte, where no machine is known: about 20 for two
processes of a CPU, 300 and more for GPUs on fast links. Only the order of magnitude matters: it decides between
computing again and sending."""


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
    """The time of an op that does not communicate, on local operands.

    `fixed`: the op's weight never changes, so that a backend may lay it out once, or view it once. `cold` says of each
    operand, and of each result behind them, whether it is in no cache; of none where it is empty. The device computes
    and moves data at `speed` times the rates of the profile; what a host adds to each op stays.
    """
    cost = entry.cost
    if cost.seconds:
        return cost.seconds(operands, attrs, results) / speed
    if Trait.VIEW in entry.traits:
        return 0.0 if fixed else profile.view * len(results)
    if Trait.SCALAR in entry.traits:
        return 0.0
    moved = moved_bytes(entry, operands, attrs, results)
    dtype = operands[0].dtype if operands else results[0].dtype
    computing, bandwidth = 0.0, profile.bandwidth
    rate = profile.ops.get(dtype, {}).get(entry.name)
    if rate:
        computing = flops(entry, operands, attrs, results) / rate
    elif cost.product:
        packed = fixed and entry.code.packed is not None and dtype in profile.packed
        matrix: Matrix = profile.packed[dtype] if packed else profile.rate(profile.matrix, dtype)
        computing = matrix.seconds(*cost.product(operands, attrs, results))
        bandwidth = matrix.bandwidth or bandwidth
    else:
        computing = flops(entry, operands, attrs, results) / profile.rate(profile.vector, dtype)
    reading = _reading(profile, bandwidth, moved, (*operands, *results), cold)
    return max(profile.dispatch, profile.overhead + _together(computing, reading, profile.overlap) / speed)


def _reading(
    profile: Profile, bandwidth: float, moved: float, tensors: Sequence[TensorType], cold: Sequence[bool]
) -> float:
    """The time to move so many bytes of `tensors`, of which those that are in no cache come at `bandwidth`."""
    far = sum(t.bytes for t, is_cold in zip(tensors, cold, strict=False) if is_cold)
    if not far:
        return moved / memory_bandwidth(profile, moved)
    share = moved * far / sum(t.bytes for t in tensors)
    near = moved - share
    return share / bandwidth + near / memory_bandwidth(profile, near)


def _together(computing: float, moving: float, overlap: float) -> float:
    """The time of an op that does both: see `Profile.overlap`."""
    longer = max(computing, moving)
    if math.isinf(overlap) or not longer:
        return longer
    return float(longer * (1.0 + (min(computing, moving) / longer) ** overlap) ** (1.0 / overlap))


def flops(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    """The floating-point operations of an op."""
    if entry.cost.flops:
        return entry.cost.flops(operands, attrs, results)
    return float(sum(t.elements for t in results))


def moved_bytes(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    """The bytes that an op reads and writes."""
    if entry.cost.moved:
        return entry.cost.moved(operands, attrs, results)
    return float(sum(t.bytes for t in operands) + sum(t.bytes for t in results))


def memory_bandwidth(profile: Profile, moved: float) -> float:
    """The bandwidth at which so many bytes are read and written: faster where they fit a cache."""
    return profile.cache_bandwidth if profile.cache and moved <= profile.cache else profile.bandwidth
