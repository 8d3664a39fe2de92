"""Collectives: communication among all devices along a mesh axis.

In a rank's program a collective blocks until it is complete. One on a stream is asynchronous: ``start_all_reduce``,
``start_all_gather``, ``start_reduce_scatter`` and ``start_resplit`` return at once, and ``finish_collective`` waits for
the result right before its first use. Ranks execute what they start in the order of the starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.layout import DTYPES, Collective, total
from distir_relax.ops.communication import serialized
from distir_relax.ops.table import (
    Attrs,
    Cost,
    Positions,
    Semantics,
    Trait,
    Types,
    concatenated,
    define,
    no_flops,
    parts_of,
    resized,
    same_type,
)


def _widening(kind: TensorType) -> float:
    """Return the ratio of the bytes of a value in its reduction dtype to those in its own dtype."""
    return 4.0 / DTYPES[kind.dtype][1] if kind.dtype in ("float16", "bfloat16") else 1.0


def _is_leading(kind: TensorType, dim: int) -> bool:
    """Return whether parts along a dim are contiguous in memory, so that no copy is needed."""
    return math.prod(kind.shape[:dim]) == 1


def _reduce_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace of reductions: narrow floats are reduced in float32."""
    return _widening(results[0]) * results[0].bytes if _widening(results[0]) > 1 else 0.0


def _cpu_reduce_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace of reductions on a CPU, whose ranks sum bfloat16 in memory that they share."""
    is_shared = results[0].dtype == "bfloat16" and attrs["op"] == "sum"
    return 0.0 if is_shared else _reduce_workspace(types, attrs, results)


def _gather_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace of gathers: the received parts, before they are concatenated along the dim."""
    return 0.0 if _is_leading(results[0], attrs["dim"]) else float(results[0].bytes)


def _scatter_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace of reduce-scatter: the operand with its parts made contiguous, in the reduction dtype."""
    wide, leading = _widening(types[0]), _is_leading(types[0], attrs["dim"])
    flat = 0.0 if leading else float(types[0].bytes)
    return flat if wide == 1 else flat + wide * (types[0].bytes + results[0].bytes)


def _exchange_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace of all-to-all: a flat buffer of outgoing parts, and the incoming parts before concatenation."""
    split_dim, concat_dim = attrs.get("split_dim", attrs.get("dim")), attrs.get("concat_dim", attrs.get("dim"))
    sent = 0.0 if _is_leading(types[0], split_dim) else float(types[0].bytes)
    return sent + (0.0 if _is_leading(results[0], concat_dim) else float(results[0].bytes))


AXIS = "the mesh axis along which devices take part, by name"
OP = "how terms are joined: sum, mean, min or max"
SIZES = "the number of elements of the dim at each index along the axis"
FINISH_COLLECTIVE = "finish_collective"
"""The op that waits for a collective that the rank has started."""
SIZE = "the number of these on the device itself: one number, or [a|b] by device"


def infer_shard(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the part of dim `dim` that a device keeps; raise ValueError unless `sizes` add up to the dim."""
    if types[0].shape[attrs["dim"]] != total(attrs["sizes"]):
        raise ValueError(f"sizes {attrs['sizes']} do not add up to dim {attrs['dim']} of {types[0].shape}")
    return (resized(types[0], attrs["dim"], attrs["size"]),)


def _gathered(parts: Sequence[Positions], dim: int, sizes: Sequence[int]) -> Positions:
    _check_sizes([len(part[dim]) for part in parts], dim, sizes)
    return concatenated(parts, dim)


def _check_sizes(held: Sequence[int], dim: int, sizes: Sequence[int]) -> None:
    if list(held) != list(sizes):
        raise ValueError(f"the devices have {held} elements of dim {dim}, not {sizes}")


def _exchanged(parts: Sequence[Positions], attrs: Attrs) -> list[Positions]:
    pieces = [parts_of(part, attrs["split_dim"], attrs["split_sizes"]) for part in parts]
    dim, sizes = attrs["concat_dim"], attrs["concat_sizes"]
    return [_gathered(received, dim, sizes) for received in zip(*pieces, strict=True)]


def _resplit(parts: Sequence[Positions], attrs: Attrs) -> list[Positions]:
    pieces = [parts_of(part, attrs["dim"], row) for part, row in zip(parts, attrs["pieces"], strict=True)]
    return [concatenated(received, attrs["dim"]) for received in zip(*pieces, strict=True)]


def _define_startable(name: str, semantics: Semantics, cost: Cost, traits: Sequence[Trait] = ()) -> None:
    """Define a collective, and the op that starts it; their methods of the communicator take the same arguments."""
    assert isinstance(semantics.torch, str)
    start = f"start_{name}"
    define(
        name,
        replace(semantics, started=start),
        cost=cost,
        traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, *traits},
    )
    define(
        start,
        replace(semantics, torch=semantics.torch.replace(f"comm.{name}(", f"comm.{start}("), serialized=None),
        cost=cost,
        traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.STARTS},
    )


_define_startable(
    "all_reduce",
    Semantics(
        infer=same_type,
        torch="comm.all_reduce({0}, {axis}, {op}, step={step})",
        attributes={"axis": AXIS, "op": OP},
        collective_semantics=lambda parts, attrs: [_reduce(parts, attrs["op"]).clone() for _ in parts],
        moved=lambda parts, attrs: list(parts),
        serialized=serialized.all_reduce,
    ),
    Cost(workspace=_reduce_workspace, cpu_workspace=_cpu_reduce_workspace, collective=Collective.ALL_REDUCE),
    [Trait.NATIVE],
)
_define_startable(
    "all_gather",
    Semantics(
        infer=lambda types, attrs: (resized(types[0], attrs["dim"], total(attrs["sizes"])),),
        torch="comm.all_gather({0}, {axis}, {dim}, {sizes}, step={step})",
        attributes={"axis": AXIS, "dim": "the dim to gather", "sizes": SIZES},
        collective_semantics=lambda parts, attrs: [_joined(parts, attrs["dim"], attrs["sizes"]) for _ in parts],
        moved=lambda parts, attrs: [_gathered(parts, attrs["dim"], attrs["sizes"])] * len(parts),
        serialized=serialized.all_gather,
    ),
    Cost(flops=no_flops, workspace=_gather_workspace, collective=Collective.ALL_GATHER),
)
_define_startable(
    "reduce_scatter",
    Semantics(
        infer=infer_shard,
        torch="comm.reduce_scatter({0}, {axis}, {dim}, {sizes}, {op}, step={step})",
        attributes={"axis": AXIS, "dim": "the dim to split", "sizes": SIZES, "size": SIZE, "op": OP},
        collective_semantics=lambda parts, attrs: list(_reduce(parts, attrs["op"]).split(attrs["sizes"], attrs["dim"])),
        moved=lambda parts, attrs: parts_of(parts[0], attrs["dim"], attrs["sizes"]),
        per_device_attrs=frozenset({"size"}),
        serialized=serialized.reduce_scatter,
    ),
    Cost(workspace=_scatter_workspace, collective=Collective.REDUCE_SCATTER),
)
define(
    FINISH_COLLECTIVE,
    Semantics(infer=same_type, torch="comm.finish_collective({0}, step={step})"),
    cost=Cost(flops=no_flops, collective=Collective.ALL_REDUCE),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.FINISHES, Trait.VIEW},
)
define(
    "all_to_all",
    Semantics(
        infer=lambda types, attrs: (
            resized(
                resized(types[0], attrs["split_dim"], attrs["size"]), attrs["concat_dim"], total(attrs["concat_sizes"])
            ),
        ),
        torch="comm.all_to_all({0}, {axis}, {split_dim}, {split_sizes}, {concat_dim}, {concat_sizes}, step={step})",
        attributes={
            "axis": AXIS,
            "split_dim": "the dim to split",
            "split_sizes": "the sizes of its parts, index by index",
            "size": SIZE,
            "concat_dim": "the dim to gather",
            "concat_sizes": "the sizes of its parts before, index by index",
        },
        collective_semantics=lambda parts, attrs: [
            _joined(
                [x.split(attrs["split_sizes"], attrs["split_dim"])[i] for x in parts],
                attrs["concat_dim"],
                attrs["concat_sizes"],
            )
            for i in range(len(parts))
        ],
        moved=_exchanged,
        per_device_attrs=frozenset({"size"}),
        serialized=serialized.all_to_all,
    ),
    cost=Cost(
        flops=no_flops,
        workspace=_exchange_workspace,
        collective=Collective.ALL_TO_ALL,
        pieces=lambda attrs, i: attrs["split_sizes"],
    ),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
_define_startable(
    "resplit",
    Semantics(
        infer=lambda types, attrs: (resized(types[0], attrs["dim"], attrs["size"]),),
        torch="comm.resplit({0}, {axis}, {dim}, {pieces}, step={step})",
        attributes={
            "axis": AXIS,
            "dim": "the split dim",
            "pieces": "for each sending index, the number of elements for each receiving index",
            "size": SIZE,
        },
        collective_semantics=lambda parts, attrs: [
            _concat(
                [x.split(row, attrs["dim"])[i] for x, row in zip(parts, attrs["pieces"], strict=True)], attrs["dim"]
            )
            for i in range(len(parts))
        ],
        moved=_resplit,
        per_device_attrs=frozenset({"size"}),
        serialized=serialized.resplit,
    ),
    Cost(
        flops=no_flops,
        workspace=_exchange_workspace,
        collective=Collective.ALL_TO_ALL,
        pieces=lambda attrs, i: attrs["pieces"][i],
    ),
)


def _reduce(parts: Sequence[Any], op: str) -> Any:
    if len({(p.shape, p.dtype) for p in parts}) > 1:
        raise ValueError(f"parts of shapes {', '.join(str(tuple(p.shape)) for p in parts)} do not match")
    # Reductions, `torch.stack` and `torch.cat` of meta tensors, which serve type inference, import torch's compiler.
    if parts[0].is_meta:
        if op == "mean" and not parts[0].is_floating_point():
            raise ValueError(f"a mean needs floats, found {parts[0].dtype}")
        return parts[0].new_empty(parts[0].shape)
    stacked = parts[0].new_empty((len(parts), *parts[0].shape))
    for index, part in enumerate(parts):
        stacked[index].copy_(part)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.mean(0) if op == "mean" else stacked.amax(0) if op == "max" else stacked.amin(0)


def _joined(parts: Sequence[Any], dim: int, sizes: Sequence[int]) -> Any:
    """Concatenate the parts of devices, which have these sizes; raise ValueError if they have others."""
    _check_sizes([part.shape[dim] for part in parts], dim, sizes)
    return _concat(parts, dim)


def _concat(parts: Sequence[Any], dim: int) -> Any:
    rest = {(p.dtype, *p.shape[:dim], *p.shape[dim + 1 :]) for p in parts}
    if len(rest) > 1:
        raise ValueError(f"parts of shapes {', '.join(str(tuple(p.shape)) for p in parts)} do not match")
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    result, start = parts[0].new_empty(shape), 0
    for part in parts:
        result.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return result
