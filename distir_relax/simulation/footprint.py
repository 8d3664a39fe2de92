"""Per-rank footprint of a compiled program: bytes of weights, and bytes sent in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distir_relax.errors import ProfileError
from distir_relax.executable.hoist import Hoist
from distir_relax.ir import Module
from distir_relax.simulation.communication_matrix import bytes_between
from distir_relax.simulation.kept_values import kept_storage
from distir_relax.support.units import count, size


@dataclass(frozen=True)
class Footprint:
    """`weights` and `sent` are bytes, by rank; `sent` is None if the program has an unknown kind of communication.

    `packed` are the bytes by which weights are more on a CPU, where a rank may hold some packed and as they are.
    """

    programs: int
    weights: tuple[int, ...]
    packed: tuple[int, ...]
    sent: tuple[int, ...] | None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.weights)

    def __str__(self) -> str:
        sent = "an unknown amount" if self.sent is None else _range(self.sent)
        packed = f" (on a CPU {_range(self.packed)} more, packed)" if any(self.packed) else ""
        return (
            f"{count(self.ranks, 'rank')}, {count(self.programs, 'distinct program')}; "
            f"a rank holds {_range(self.weights)} of weights{packed} and sends {sent} in a run"
        )


def footprint(distributed: Module, ranked: Module) -> Footprint:
    """Compute the footprint of a program from its last two stages."""
    sizes: dict[str, tuple[int, int]] = {}
    executable = Hoist().run(ranked)
    for function in ranked.functions:
        if function.name in ranked.ranks:
            weights_only = sum(item.value.tensor.bytes for item in function.inputs if item.role != "input")
            kept = {v.name: v for v in kept_storage(executable, executable.function(function.name)).values()}
            more = sum(value.tensor.bytes for value in kept.values()) - weights_only
            sizes[function.name] = weights_only, max(0, more)
    weights = tuple(sizes[name][0] for name in ranked.ranks)
    packed = tuple(sizes[name][1] for name in ranked.ranks)
    try:
        matrix = bytes_between(distributed)
    except ProfileError:
        return Footprint(len(sizes), weights, packed, None)
    sent = np.bincount(matrix.source, matrix.bytes, minlength=len(weights))
    return Footprint(len(sizes), weights, packed, tuple(map(round, sent.tolist())))


def _range(values: Sequence[int]) -> str:
    low, high = size(min(values)), size(max(values))
    return low if low == high else f"{low} to {high}"
