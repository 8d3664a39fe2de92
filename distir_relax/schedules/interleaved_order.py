"""Order in which a rank runs microbatches through its chunks: depth first, in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from distir_relax.schedules.task import Shape


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of microbatches; `sizes` has the number in each."""

    sizes: tuple[int, ...]
    chunks: int

    @property
    def ahead(self) -> int:
        """Return the number of forwards of the first round before any in the last chunk."""
        return (self.chunks - 1) * self.sizes[0]

    def forwards(self) -> Iterator[tuple[int, int]]:
        """Yield chunk and microbatch in the order of forwards."""
        for microbatches in self._rounds():
            yield from ((chunk, m) for chunk in range(self.chunks) for m in microbatches)

    def backwards(self) -> Iterator[tuple[int, int]]:
        """Yield chunk and microbatch in the order of backwards: the last chunk first."""
        for microbatches in self._rounds():
            yield from ((chunk, m) for chunk in reversed(range(self.chunks)) for m in microbatches)

    def _rounds(self) -> list[range]:
        ends = accumulate(self.sizes)
        return [range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


def interleaved_rounds(shape: Shape) -> Rounds:
    """Return rounds of at least as many microbatches as ranks, as equal as possible; a single one for fewer."""
    count = max(1, shape.microbatches // shape.ranks)
    size, remainder = divmod(shape.microbatches, count)
    return Rounds((size + 1,) * remainder + (size,) * (count - remainder), shape.chunks)
