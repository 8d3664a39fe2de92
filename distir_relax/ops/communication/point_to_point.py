"""Point-to-point transfers between two device sets: each device sends to the one at the same index.

In a rank's program, ``send`` and ``recv`` block until both are reached. Transfers on a stream are asynchronous:
``start_send`` returns at once, ``start_recv`` posts the receive buffer, and ``finish_recv`` waits for the data right
before its first use. They are matched by step, in any order.
"""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.layout import Collective
from distir_relax.ops.table import Attrs, Cost, Semantics, Trait, Types, define, no_flops, same_type


def _infer_send(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    # On the sending rank the result is empty; every op has a result.
    return (TensorType((0,), types[0].dtype) if "peer" in attrs else types[0],)


def _infer_recv(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs["shape"], attrs["dtype"]),)


_RECV_ATTRIBUTES = {
    "shape": "the shape of the received tensor",
    "dtype": "its dtype, such as float32",
    "peer": "the sending rank",
}

define(
    "send",
    Semantics(infer=_infer_send, torch="comm.send({0}, {peer}, step={step})"),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.TRANSFER, Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
define(
    "recv",
    Semantics(
        infer=_infer_recv,
        attributes=_RECV_ATTRIBUTES,
        torch="comm.recv({shape}, {dtype}, {peer}, step={step})",
    ),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
define(
    "start_send",
    Semantics(
        infer=lambda types, attrs: (TensorType((0,), types[0].dtype),),
        attributes={
            "peer": "the receiving rank",
            "copy": "whether the program may change the operand during the transfer",
        },
        torch="comm.start_send({0}, {peer}, {copy}, step={step})",
    ),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.STARTS},
)
define(
    "start_recv",
    Semantics(
        infer=_infer_recv,
        attributes=_RECV_ATTRIBUTES,
        torch="comm.start_recv({shape}, {dtype}, {peer}, step={step})",
    ),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.STARTS},
)
define(
    "finish_recv",
    Semantics(
        infer=same_type,
        attributes={"peer": _RECV_ATTRIBUTES["peer"]},
        torch="comm.finish_recv({0}, {peer}, step={step})",
    ),
    cost=Cost(flops=no_flops, collective=Collective.SEND),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.FINISHES, Trait.VIEW},
)
