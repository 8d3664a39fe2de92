"""Builder of the tasks of one rank."""

from __future__ import annotations

from distir_relax.schedules.task import Kind, Task


class TaskList:
    """A list of tasks in which each kind of each stage takes the microbatches in order, so they need not be given."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._done: dict[tuple[Kind, int], int] = {}

    def add(self, kinds: str, stage: int) -> None:
        """Append one task of each of these kinds. A whole backward is the next of both its halves."""
        kind: Kind
        for kind in kinds:  # type: ignore[assignment]
            self._tasks.append(Task(kind, stage, self.count("I" if kind == "B" else kind, stage)))
            halves: tuple[Kind, ...] = ("I", "W") if kind == "B" else (kind,)
            for half in halves:
                self._done[half, stage] = self.count(half, stage) + 1

    def count(self, kind: Kind, stage: int) -> int:
        """Return the number of tasks of a kind and stage so far."""
        return self._done.get((kind, stage), 0)

    def truncate(self, microbatches: int) -> tuple[Task, ...]:
        """Return the tasks of the first microbatches. An order stays valid without whole microbatches."""
        return tuple(task for task in self._tasks if task.microbatch < microbatches)
