"""From each device of a set to the one at the same place in another."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.layout import Collective
from distir_relax.ops.table import Attrs, Cost, Semantics, Trait, Types, define, no_flops


def _infer_send(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    # A rank that has sent holds nothing of the result; an op has a result all the same.
    return (TensorType((0,), types[0].dtype) if "peer" in attrs else types[0],)


define(
    "send",
    Semantics(infer=_infer_send, torch="comm.send({0}, {peer}, step={step})"),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.TRANSFER, Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
define(
    "recv",
    Semantics(
        infer=lambda types, attrs: (TensorType(attrs["shape"], attrs["dtype"]),),
        attributes={
            "shape": "the shape of what comes",
            "dtype": "its dtype, such as float32",
            "peer": "the rank that sends it",
        },
        torch="comm.recv({shape}, {dtype}, {peer}, step={step})",
    ),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
