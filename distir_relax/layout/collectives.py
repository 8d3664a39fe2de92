"""Collectives along one mesh axis: the placements they convert between, and their traffic.

This is the only model of collective traffic. Of n devices, with ring algorithms (Thakur, Rabenseifner and Gropp, 2005);
B is the number of bytes of the whole tensor or of a device's buffer::

    collective       from -> to       rounds       each device sends
    all_reduce       I -> R           2 (n - 1)    2 B (n - 1) / n to the next
    all_gather       S -> R           n - 1        all shards but the next device's own, to the next
    reduce_scatter   I -> S           n - 1        all pieces but its own, to the next
    all_to_all       S -> S'          n - 1        to each other device its piece
    send             At -> At'        1            B to the receiver

An op's entry names its collective (`Cost.collective`). Propagation and reshard plans assume equal shards
(`Collective.balanced_volume`); ranks and the communication matrix of a simulation use the actual pieces
(`Collective.volume`); the network model (`cost.network`) converts rounds and bytes to seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from distir_relax.layout.placement import Partial, Placement, Replicate, Shard


class Collective(StrEnum):
    """A communication pattern of the devices along a mesh axis, or of two of them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"

    def rounds(self, ranks: int) -> int:
        """Return the number of consecutive sends of each of `ranks` devices."""
        if self is Collective.SEND:
            return 1
        return (2 if self is Collective.ALL_REDUCE else 1) * (ranks - 1)

    def balanced_volume(self, ranks: int, size: float) -> float:
        """Return the amount that each of `ranks` devices sends, given the `size` of each one's equal share."""
        if self is Collective.ALL_GATHER:
            return (ranks - 1) * size
        if self is Collective.SEND:
            return size
        part = (ranks - 1) / ranks
        return 2 * part * size if self is Collective.ALL_REDUCE else part * size

    def volume(self, ranks: int, total: Any, own_piece: Any = 0, next_piece: Any = 0) -> Any:
        """Return the amount that a device sends, in the unit of the arguments: numbers or arrays.

        `total` is the sum of all pieces: of the shards for an all-gather, of the device's own buffer otherwise;
        `own_piece` is the piece that the device keeps, `next_piece` that of the next device.
        """
        match self:
            case Collective.ALL_REDUCE:
                return 2 * (ranks - 1) * total / ranks
            case Collective.ALL_GATHER:
                return total - next_piece
            case Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
                return total - own_piece
        return total


def collective_between(source: Placement, target: Placement) -> Collective | None:
    """Return the collective that converts between two placements along an axis; None if nothing is sent.

    A term of `I[mean]`, `I[min]` or `I[max]` is the whole tensor, so a shard is gathered to get it.
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
