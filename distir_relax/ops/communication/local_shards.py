"""Local shards of replicated data, selected by the device's index along a mesh axis. No communication."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.communication import serialized
from distir_relax.ops.communication.collectives import AXIS, SIZE, SIZES, infer_shard
from distir_relax.ops.table import FREE, Attrs, Code, Semantics, Trait, chosen, define, parts_of, resized

define(
    "shard",
    Semantics(
        infer=infer_shard,
        attributes={"axis": AXIS, "dim": "the dim to split", "sizes": SIZES, "size": SIZE},
        torch="comm.shard({0}, {axis}, {dim}, {sizes})",
        collective_semantics=lambda parts, attrs: [
            x.split(attrs["sizes"], attrs["dim"])[i] for i, x in enumerate(parts)
        ],
        moved=lambda parts, attrs: [parts_of(part, attrs["dim"], attrs["sizes"])[i] for i, part in enumerate(parts)],
        serialized=serialized.shard,
    ),
    cost=FREE,
    traits={Trait.ON_COMMUNICATOR, Trait.VIEW},
)


define(
    "shard_start",
    Semantics(
        infer=lambda types, attrs: (TensorType((), attrs["dtype"]),),
        attributes={"axis": AXIS, "sizes": SIZES, "dtype": "the dtype of the result"},
        torch="comm.shard_start({axis}, {sizes}, {dtype})",
        collective_semantics=lambda parts, attrs: _starts(attrs),
        serialized=serialized.shard_start,
    ),
    cost=FREE,
    traits={Trait.ON_COMMUNICATOR},
)


def _split_segments(attrs: Attrs, form: str) -> list[str]:
    return [form.format(a=a, b=b, dim=attrs["dim"]) for a, b in attrs["intervals"]]


define(
    "slices",
    Semantics(
        infer=lambda types, attrs: (resized(types[0], attrs["dim"], sum(b - a for a, b in attrs["intervals"])),),
        torch=lambda attrs: (
            "torch.cat(["
            + ", ".join(_split_segments(attrs, "{{{{0}}}}[{p}{{a}}:{{b}}]".format(p=":, " * attrs["dim"])))
            + "], {dim})"
        ),
        moved=lambda parts, attrs: [chosen(parts[0], attrs["dim"], attrs["intervals"])],
        serialized=serialized.slices,
    ),
    cost=FREE,
    code=Code(
        relax=lambda attrs: (
            "R.concat(["
            + ", ".join(_split_segments(attrs, "R.strided_slice({{0}}, ({dim},), ({a},), ({b},))"))
            + "], {dim})"
        )
    ),
)


def _starts(attrs: Attrs) -> list[Any]:
    import torch

    dtype = getattr(torch, attrs["dtype"])
    return [torch.tensor(sum(attrs["sizes"][:i]), dtype=dtype) for i in range(len(attrs["sizes"]))]
