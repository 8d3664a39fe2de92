"""What collectives do to a layout along one mesh axis, and how much they send: the one place that says so.

Of n devices, as rings (Thakur, Rabenseifner and Gropp, 2005); B bytes are the whole tensor or buffer of a device::

    collective       from -> to       rounds       each device sends
    all_reduce       I -> R           2 (n - 1)    2 B (n - 1) / n to the next
    all_gather       S -> R           n - 1        all shards but the next device's own, to the next
    reduce_scatter   I -> S           n - 1        all pieces but its own, to the next
    all_to_all       S -> S'          n - 1        to each other device its piece
    send             At -> At'        1            B to the receiver

An op's entry names its collective (`Cost.collective`). Propagation and redistribution plans count bytes for equal
shards (`Collective.sends`); a rank counts what it sends, and the matrix of a simulation what all do, piece by piece
(`Collective.sends_of`); the network model (`cost.network`) makes seconds of rounds and bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from distir_relax.layout.placement import Partial, Placement, Replicate, Shard


class Collective(StrEnum):
    """A pattern of communication among the devices along a mesh axis, or between two of them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"

    def rounds(self, ranks: int) -> int:
        """How often each of `ranks` devices sends, one after the other."""
        if self is Collective.SEND:
            return 1
        return (2 if self is Collective.ALL_REDUCE else 1) * (ranks - 1)

    def sends(self, ranks: int, held: float) -> float:
        """What each of `ranks` devices sends, of `held` that each brings, where all bring and get equally much."""
        if self is Collective.ALL_GATHER:
            return (ranks - 1) * held
        if self is Collective.SEND:
            return held
        part = (ranks - 1) / ranks
        return 2 * part * held if self is Collective.ALL_REDUCE else part * held

    def sends_of(self, ranks: int, whole: Any, own: Any = 0, following: Any = 0) -> Any:
        """What a device sends, in the unit of the arguments: numbers, or arrays of them.

        `whole` is the sum of all pieces: of the shards for an all-gather, of what the device brings otherwise; `own` is
        the piece that the device keeps, `following` that of the next one.
        """
        match self:
            case Collective.ALL_REDUCE:
                return 2 * (ranks - 1) * whole / ranks
            case Collective.ALL_GATHER:
                return whole - following
            case Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
                return whole - own
        return whole


def collective_between(source: Placement, target: Placement) -> Collective | None:
    """The collective that takes a tensor from one placement along an axis to another; None where nothing is sent.

    A term of `I[mean]`, `I[min]` or `I[max]` is the whole tensor, so a shard is gathered for it.
    """
    match source, target:
        case Shard(), Shard():
            return None if source == target else Collective.ALL_TO_ALL
        case Shard(), Replicate():
            return Collective.ALL_GATHER
        case Shard(), Partial() if target.reduction != "sum":
            return Collective.ALL_GATHER
        case Partial(), Replicate():
            return Collective.ALL_REDUCE
        case Partial(), Shard():
            return Collective.REDUCE_SCATTER
    return None
