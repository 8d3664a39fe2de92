"""In which order a rank takes microbatches through its chunks: depth first, in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from distir_relax.schedules.task import Shape


@dataclass(frozen=True, slots=True)
class Rounds:
    """`sizes` has how many microbatches there are in each round."""

    sizes: tuple[int, ...]
    chunks: int

    @property
    def ahead(self) -> int:
        """Forwards of the first round before any in the last chunk."""
        return (self.chunks - 1) * self.sizes[0]

    def forwards(self) -> Iterator[tuple[int, int]]:
        """Chunk and microbatch, in the order of forwards."""
        for microbatches in self._rounds():
            yield from ((chunk, m) for chunk in range(self.chunks) for m in microbatches)

    def backwards(self) -> Iterator[tuple[int, int]]:
        """Chunk and microbatch, in the order of backwards: the last chunk comes first."""
        for microbatches in self._rounds():
            yield from ((chunk, m) for chunk in reversed(range(self.chunks)) for m in microbatches)

    def _rounds(self) -> list[range]:
        ends = accumulate(self.sizes)
        return [range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


def through_chunks(shape: Shape) -> Rounds:
    """Rounds of at least as many microbatches as ranks, as equal as they can be; one round where there are fewer."""
    count = max(1, shape.microbatches // shape.ranks)
    size, more = divmod(shape.microbatches, count)
    return Rounds((size + 1,) * more + (size,) * (count - more), shape.chunks)
