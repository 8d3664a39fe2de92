"""Per-rank footprint of a compiled program: bytes of weights, and bytes sent in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distir_relax.analysis.communication_matrix import bytes_between
from distir_relax.errors import ProfileError
from distir_relax.ir import Module
from distir_relax.support.units import count, size


@dataclass(frozen=True)
class Footprint:
    """`weights` and `sent` are bytes, by rank; `sent` is None if the program has an unknown kind of communication."""

    programs: int
    weights: tuple[int, ...]
    sent: tuple[int, ...] | None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.weights)

    def __str__(self) -> str:
        sent = "an unknown amount" if self.sent is None else _range(self.sent)
        return (
            f"{count(self.ranks, 'rank')}, {count(self.programs, 'distinct program')}; "
            f"a rank holds {_range(self.weights)} of weights and sends {sent} in a run"
        )


def footprint(distributed: Module, ranked: Module) -> Footprint:
    """Compute the footprint of a program from its last two stages."""
    weight_bytes = {
        function.name: sum(item.value.tensor.bytes for item in function.inputs if item.role != "input")
        for function in ranked.functions
        if function.name in ranked.ranks
    }
    weights = tuple(weight_bytes[name] for name in ranked.ranks)
    try:
        matrix = bytes_between(distributed)
    except ProfileError:
        return Footprint(len(weight_bytes), weights, None)
    sent = np.bincount(matrix.source, matrix.bytes, minlength=len(weights))
    return Footprint(len(weight_bytes), weights, tuple(map(round, sent.tolist())))


def _range(values: Sequence[int]) -> str:
    low, high = size(min(values)), size(max(values))
    return low if low == high else f"{low} to {high}"
