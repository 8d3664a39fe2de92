"""Tasks of one rank, written down one after the other."""

from __future__ import annotations

from distir_relax.schedules.task import Kind, Task


class Counted:
    """Each kind of task of each stage does the microbatches in their order, so that kind and stage say the task."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._done: dict[tuple[Kind, int], int] = {}

    def add(self, kinds: str, stage: int) -> None:
        """One task of each of these kinds, in this order. A whole backward is the next of both its halves."""
        kind: Kind
        for kind in kinds:  # type: ignore[assignment]
            self._tasks.append(Task(kind, stage, self.count("I" if kind == "B" else kind, stage)))
            halves: tuple[Kind, ...] = ("I", "W") if kind == "B" else (kind,)
            for half in halves:
                self._done[half, stage] = self.count(half, stage) + 1

    def count(self, kind: Kind, stage: int) -> int:
        """How many there are so far."""
        return self._done.get((kind, stage), 0)

    def first(self, microbatches: int) -> tuple[Task, ...]:
        """The tasks of the first so many microbatches. An order stays valid where whole microbatches are left out."""
        return tuple(task for task in self._tasks if task.microbatch < microbatches)
