"""Comparison of the replicas of a program's state, by digests: memory that changed in one of them is named."""

from __future__ import annotations

import hashlib
import math
import platform
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest, Tensor, local_intervals, local_shape
from distir_relax.errors import LostError
from distir_relax.layout import Interval
from distir_relax.runtime.outputs import holders
from distir_relax.runtime.session import Session
from distir_relax.runtime.state import changing
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch

Exchange = Callable[[Any], list[Any]]
"""Returns the value, of JSON's types, of each process of a launch. All processes call it alike."""

_ROW = 1 << 15
"""Numbers of 64 bits of which a sum is kept."""
_ROWS = 8
"""Rows that are multiplied at a time: 2 MiB, which stay in a cache."""


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same elements of a tensor, two of them or more, in ascending order."""

    tensor: Tensor
    ranks: tuple[int, ...]


def replicas_of(manifest: Manifest) -> list[Replicas]:
    """Return the replicas of each part of the state of which more than one rank holds a copy."""
    return [
        Replicas(tensor, tuple(ranks))
        for tensor in changing(manifest)
        for ranks in holders(manifest.mesh, tensor)
        if len(ranks) > 1 and all(local_intervals(tensor, manifest.mesh, ranks[0]))
    ]


def digest(tensor: torch.Tensor) -> int:
    """Return 64 bits that differ for tensors of which one element has other bits, and almost surely for others.

    Of each row of numbers of 64 bits, these are summed times odd numbers drawn at random, so that no change of one of
    them leaves the sum; the sums are hashed. It reads memory once, at close to its bandwidth.
    """
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    numbers, factors = flat[:whole].view(torch.int64), _factors(str(flat.device))
    product = factors.new_empty(_ROWS, _ROW)
    sums = []
    for block in torch.split(numbers, _ROWS * _ROW):
        rows = block.numel() // _ROW
        full = block[: rows * _ROW].view(rows, _ROW)
        sums.append(torch.mul(full, factors, out=product[:rows]).sum(1))
        rest = block[rows * _ROW :]
        sums.append((rest * factors[0, : rest.numel()]).sum().view(1))
    texts = [torch.cat(sums).cpu().numpy().tobytes()] if sums else []
    texts.append(bytes(flat[whole:].tolist()))
    return int.from_bytes(hashlib.blake2b(b"".join(texts), digest_size=8).digest(), "big")


def difference(session: Session, exchange: Exchange, steps: int, hint: str = "") -> LostError | None:
    """Return an error that names the first element of the state, after `steps` steps, of which replicas differ.

    None if all are equal. All processes of a launch call this between two steps, and get equal results. It exchanges
    one digest for each set of ranks that hold replicas; where those differ, that of each tensor, and then those of
    halves of the first tensor, down to the element.
    """
    state = {comm.rank: program.state for comm, program in zip(session.communicators, session.programs, strict=True)}
    replicas = replicas_of(session.bundle.manifest)
    if not replicas:
        return None
    digests = {
        rank: [digest(shards[r.tensor.name]) if rank in r.ranks else 0 for r in replicas]
        for rank, shards in state.items()
    }
    together = sorted({r.ranks for r in replicas})
    combined = {
        rank: [_combined(digests[rank], [r.ranks == ranks for r in replicas]) for ranks in together] for rank in state
    }
    everyone = _by_rank(exchange, combined)
    if all(len({everyone[rank][at] for rank in ranks}) == 1 for at, ranks in enumerate(together)):
        return None
    every_digest = _by_rank(exchange, digests)
    for at, found in enumerate(replicas):
        theirs = {rank: every_digest[rank][at] for rank in found.ranks}
        if len(set(theirs.values())) > 1:
            return _error(session, state, exchange, found, theirs, steps, hint)
    raise AssertionError("combined digests differ, and so does one of them")


def _error(
    session: Session, state: Mapping[int, Mapping[str, torch.Tensor]], exchange: Exchange, found: Replicas,
    digests: Mapping[int, int], steps: int, hint: str,
) -> LostError:  # fmt: skip
    """Return the error of replicas with other digests."""
    (usual, count), *_ = Counter(digests.values()).most_common()
    others = [rank for rank in found.ranks if digests[rank] != usual]
    pair = next(rank for rank in found.ranks if digests[rank] == usual), others[0]
    manifest, name = session.bundle.manifest, found.tensor.name
    mine = {rank: shards[name].detach().reshape(-1) for rank, shards in state.items() if rank in pair}
    elements = math.prod(local_shape(found.tensor, manifest.mesh, pair[0]))
    element = _first_difference(exchange, mine, pair, elements)
    values = _by_rank(exchange, {rank: [platform.node(), str(flat[element].item())] for rank, flat in mine.items()})
    (host, expected), (other_host, actual) = values[pair[0]], values[pair[1]]
    place = ", ".join(map(str, _global_index(element, local_intervals(found.tensor, manifest.mesh, pair[0]))))
    told = f"rank {pair[1]} on {other_host} has {actual} at [{place}]"
    if 2 * count > len(digests):
        told += f", {count} others have {expected}"
        told += f"; others that differ: {listed([f'rank {rank}' for rank in others[1:]], 4)}" if others[1:] else ""
    else:
        told += f", rank {pair[0]} on {host} has {expected}"
    cause = "a rank's memory or arithmetic is faulty, or processors of other kinds round differently"
    advice = "; ".join(filter(None, (cause, hint)))
    return LostError(f"replicas differ after step {steps}: {told}", name, advice)


def _first_difference(
    exchange: Exchange, mine: Mapping[int, torch.Tensor], pair: tuple[int, int], elements: int
) -> int:
    """Return the first element in which the flat shards of a pair of ranks differ, of which `mine` are here."""
    start, stop = 0, elements
    while stop - start > 1:
        middle = (start + stop) // 2
        halves = _by_rank(exchange, {rank: digest(flat[start:middle]) for rank, flat in mine.items()})
        if halves[pair[0]] != halves[pair[1]]:
            stop = middle
        else:
            start = middle
    return start


def _global_index(element: int, intervals: Sequence[Sequence[Interval]]) -> list[int]:
    """Return the index in the global tensor of an element of a shard, counted in row-major order."""
    index = []
    for pieces in reversed(intervals):
        element, local = divmod(element, sum(stop - start for start, stop in pieces))
        for start, stop in pieces:
            if local < stop - start:
                index.append(start + local)
                break
            local -= stop - start
    return index[::-1]


def _combined(digests: Sequence[int], chosen: Sequence[bool]) -> int:
    text = b"".join(value.to_bytes(8, "big") for value, is_chosen in zip(digests, chosen, strict=True) if is_chosen)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _by_rank(exchange: Exchange, mine: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values of all ranks; `mine` are those of this process's ranks."""
    everyone = exchange([[rank, value] for rank, value in mine.items()])
    return {rank: value for process in everyone for rank, value in process}


@cache
def _factors(device: str) -> torch.Tensor:
    """Return a row of odd numbers, the same on every rank."""
    import torch

    generator = random.Random(0)
    return torch.tensor([[generator.getrandbits(63) | 1 for _ in range(_ROW)]], device=device)
