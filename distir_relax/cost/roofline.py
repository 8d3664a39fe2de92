"""Cost of an op on a device: a roofline over its entry's counts, with slower matrix products for small sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.cost.profile import Matrix, Profile
from distir_relax.ir import TensorType
from distir_relax.ops import OpDef, Packed, Trait
from distir_relax.ops.table.entry import typical_costs

FLOPS_PER_BYTE = 100.0
"""Operations in the time of sending a byte, for decisions without a machine: about 20 for two processes of a CPU,
300 and more for GPUs on fast links. Only the order of magnitude matters: it decides between recompute and
communication."""


@dataclass(frozen=True)
class OpWork:
    """The counts of an op, which do not depend on the device; see `op_work`."""

    name: str
    """The op of which a profile may have rates."""
    dtype: str = ""
    flops: float = 0.0
    """Floating-point operations."""
    product: tuple[int, int, int, int] | None = None
    """(batch, rows, columns, inner) of a matrix product."""
    cpu_product: tuple[int, int, int, int] | None = None
    """The part of it that kernels of CPUs compute."""
    weights: str = ""
    """The dtype of the product's second operand: products of 8-bit weights have rates of their own."""
    can_be_packed: bool = False
    """Whether a backend may pack the op's constant weight once."""
    moved: float = 0.0
    """Bytes read and written."""
    uncached: float = 0.0
    """Those of them that may be outside of all caches."""
    share: float = 1.0
    """The share of equal ops for which they are."""
    views: int | None = None
    """Views to create; None for ops that compute."""
    shape_ops: int = 0
    """Ops on shapes that the model's own program runs here."""
    native: bool = False
    """Whether a native kernel runs it in a program that is recorded: Python takes no time for it."""
    seconds: float | None = None
    """The time on a device of speed 1, if it does not depend on the device otherwise."""


def op_work(
    entry: OpDef,
    operands: Sequence[TensorType],
    attrs: Mapping[str, Any],
    results: Sequence[TensorType],
    fixed: bool = False,
    cold: Sequence[bool] = (),
    share: float = 1.0,
    recorded: bool = False,
) -> OpWork:
    """Return the counts of an op that does not communicate, on local operands, for typical values of symbolic sizes.

    `fixed`: the op's weight is constant, so that a backend may pack it once, or view it once. `cold` is whether each
    operand, and after them each result, is outside of all caches; none if empty. Of those that are, a `share` is.
    `recorded` is whether the program is, so that ops with native kernels run without Python.
    """
    cost = entry.cost
    operands, attrs, results = typical_costs(operands, attrs, results)
    if cost.seconds:
        return OpWork(entry.name, seconds=cost.seconds(operands, attrs, results))
    if cost.shape_ops:
        return OpWork(entry.name, views=0, shape_ops=int(cost.shape_ops(operands, attrs, results)))
    if Trait.VIEW in entry.traits:
        return OpWork(entry.name, views=0 if fixed or recorded else len(results))
    if Trait.SCALAR in entry.traits:
        return OpWork(entry.name, views=0)
    tensors = (*operands, *results)
    moved = _moved_bytes(entry, operands, attrs, results)
    cold_bytes = sum(t.bytes for t, is_cold in zip(tensors, cold, strict=False) if is_cold)
    is_packed = fixed and entry.kernel(Packed) is not None
    return OpWork(
        cost.kernels_of or entry.name,
        # A choice between two tensors begins with a mask.
        next((t.dtype for t in operands if t.dtype != "bool"), results[0].dtype),
        _flops(entry, operands, attrs, results),
        cost.product(operands, attrs, results) if cost.product else None,
        (cost.cpu_product or cost.product)(operands, attrs, results) if cost.product else None,
        operands[1].dtype if cost.product and len(operands) > 1 else "",
        is_packed,
        moved,
        moved * cold_bytes / sum(t.bytes for t in tensors) if cold_bytes else 0.0,
        share,
        native=recorded and (entry.is_native or is_packed),
    )


def uncached_share(used: float, cache: float) -> float:
    """Return the share of data that a step finds outside of a cache in which it `used` so many bytes since.

    None up to half of the cache, all from twice the cache on. Two cores of an EPYC with 32 MB of cache each read a byte
    of weights, all of them in turn, in 0.014 ns where they used 8 MB, in 0.022 at 20 MB, 0.034 at 31 MB, 0.046 at 47
    MB, and in 0.056 from 65 MB on.
    """
    return min(1.0, max(0.0, (used / cache - 0.5) / 1.5))


def cache_of(half: float) -> float:
    """Return the size of a cache from the bytes of which it holds half, if they are read in turn: see
    `uncached_share`."""
    return half / 1.25


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
    """Return the seconds of an op on local operands that does not communicate: `repeated_seconds` of its `op_work`."""
    return repeated_seconds(profile, op_work(entry, operands, attrs, results, fixed, cold), speed)


def work_seconds(profile: Profile, work: OpWork, speed: float = 1.0) -> float:
    """Return the seconds of an op with these counts.

    Compute and memory rates are `speed` times those of the profile; the overhead per op is not scaled. Where host and
    device take turns, it is the time of both.
    """
    if work.seconds is not None:
        return work.seconds / speed
    if work.views is not None:
        return 0.0 if profile.is_asynchronous else host_seconds(profile, work)
    compute, start, bandwidth, call = 0.0, 0.0, profile.bandwidth, profile.call
    cache_bandwidth = memory_bandwidth(profile, work.moved - work.uncached)
    rate = profile.ops.get(work.dtype, {}).get(work.name)
    own = profile.products.get(work.dtype, {}).get(work.name)
    if rate:
        compute = work.flops / rate
        start = profile.starts.get(work.dtype, {}).get(work.name, 0.0)
        call = profile.calls.get(work.dtype, {}).get(work.name, call)
    elif work.product:
        matrix = own or _products(profile, work)
        compute = matrix.seconds(*(work.cpu_product if own and work.cpu_product else work.product))
        bandwidth = matrix.bandwidth or bandwidth
        cache_bandwidth = own.bandwidth if own and own.bandwidth else cache_bandwidth
        call = matrix.call
    else:
        compute = work.flops / profile.rate(profile.vector, work.dtype)
    cached = (work.moved - work.uncached) / cache_bandwidth
    seconds = _combine(compute, cached + work.uncached / bandwidth, profile.overlap)
    if work.uncached and work.share < 1.0:
        nearer = _combine(compute, work.moved / memory_bandwidth(profile, work.moved), profile.overlap)
        seconds = work.share * seconds + (1.0 - work.share) * nearer
    python = 0.0 if work.native else call + profile.python
    return profile.overhead + python + (start + seconds) / speed


def _products(profile: Profile, work: OpWork) -> Matrix:
    """Return the rates of an op's products: those of its weights' dtype if they were measured, else of its input's."""
    for dtype in (work.weights, work.dtype):
        if work.can_be_packed and dtype in profile.packed:
            return profile.packed[dtype]
        if dtype in profile.matrix:
            return profile.matrix[dtype]
    rate: Matrix = profile.rate(profile.matrix, work.dtype)
    return rate


def error_kind(profile: Profile, entry: OpDef) -> str:
    """Return the kind of an op's error, one of `OP_KINDS`."""
    if Trait.COMMUNICATES in entry.traits:
        return "collectives"
    if Trait.VIEW in entry.traits:
        return "views"
    # Of products, attention has a rate of its own.
    own = (*profile.ops.values(), *profile.products.values())
    if entry.cost.product and not any((entry.cost.kernels_of or entry.name) in names for names in own):
        return "products"
    return "elementwise" if Trait.POINTWISE in entry.traits or entry.updates else "rows"


def host_seconds(profile: Profile, work: OpWork) -> float:
    """Return the seconds of the host to issue an op with these counts."""
    if work.views is None:
        return profile.dispatch
    return profile.view * work.views + profile.shape_op * work.shape_ops


def repeated_seconds(profile: Profile, work: OpWork, speed: float = 1.0) -> float:
    """Return the seconds from one op to the next if ops with these counts follow each other."""
    return max(host_seconds(profile, work), work_seconds(profile, work, speed))


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
    return _flops(entry, *typical_costs(operands, attrs, results))


def moved_bytes(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    """Return the bytes that an op reads and writes, for typical values of symbolic sizes."""
    return _moved_bytes(entry, *typical_costs(operands, attrs, results))


def _flops(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    if entry.cost.flops:
        return entry.cost.flops(operands, attrs, results)
    return float(sum(t.elements for t in results))


def _moved_bytes(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType]
) -> float:
    if entry.cost.moved:
        return entry.cost.moved(operands, attrs, results)
    return float(sum(t.bytes for t in operands) + sum(t.bytes for t in results))


def memory_bandwidth(profile: Profile, moved: float) -> float:
    """Return the bandwidth for `moved` bytes read and written: that of the cache if they fit."""
    return profile.cache_bandwidth if profile.cache and moved <= profile.cache else profile.bandwidth
