"""Point-to-point transfers between two device sets: each device sends to the one at the same index.

In a rank's program, ``send`` and ``recv`` block until both are reached. Transfers on a stream are asynchronous:
``start_send`` returns at once, ``start_recv`` posts the receive buffer, and ``finish_recv`` waits for the data right
before its first use. They are matched by step, in any order. The other rank is given by its distance, so that ranks
that send to neighbours share a program.
"""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.layout import Collective
from distir_relax.ops.table import Attrs, Cost, Semantics, Trait, Types, define, no_flops, same_type
from distir_relax.ops.table.entry import Infer


def _infer_send(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    # On the sending rank the result is empty; every op has a result.
    return (TensorType((0,), types[0].dtype) if "distance" in attrs else types[0],)


def _infer_recv(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs["shape"], attrs["dtype"]),)


_RECV_ATTRIBUTES = {
    "shape": "the shape of the received tensor",
    "dtype": "its dtype, such as float32",
    "distance": "the number of the sending rank, minus that of this one",
}


def _define(name: str, infer: Infer, torch: str, *traits: Trait, **attributes: str) -> None:
    define(
        name,
        Semantics(infer=infer, torch=torch, attributes=attributes),
        cost=Cost(flops=no_flops, collective=Collective.SEND),
        traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, *traits},
    )


_define("send", _infer_send, "comm.send({0}, comm.rank + {distance}, step={step})", Trait.TRANSFER)
_define("recv", _infer_recv, "comm.recv({shape}, {dtype}, comm.rank + {distance}, step={step})", **_RECV_ATTRIBUTES)
_define(
    "start_send",
    lambda types, attrs: (TensorType((0,), types[0].dtype),),
    "comm.start_send({0}, comm.rank + {distance}, {copy}, step={step})",
    Trait.STARTS,
    distance="the number of the receiving rank, minus that of this one",
    copy="whether the program may change the operand during the transfer",
)
_define(
    "start_recv",
    _infer_recv,
    "comm.start_recv({shape}, {dtype}, comm.rank + {distance}, step={step})",
    Trait.STARTS,
    **_RECV_ATTRIBUTES,
)
_define(
    "finish_recv",
    same_type,
    "comm.finish_recv({0}, comm.rank + {distance}, step={step})",
    *(Trait.FINISHES, Trait.VIEW),
    distance=_RECV_ATTRIBUTES["distance"],
)
