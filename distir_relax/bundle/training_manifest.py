"""What a bundle says of a program that is a step of training: which outputs and inputs a run has to do with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distir_relax.support import Fields
from distir_relax.support.learning_rate import Schedule, schedule_from_json, schedule_to_json


@dataclass(frozen=True)
class TrainingManifest:
    """A step of training: the output that is its loss, and the inputs that are no data.

    `rate` is the input that is the learning rate, a float64 without dims; at each step it is what `schedule` gives.
    `seed` is the input, if there is one, that tells the random numbers of a step from those of others, an int64: at the
    first step `first_seed`, at each further one more. `done` are the steps that were made before the bundle was
    written.
    """

    loss: str
    schedule: Schedule
    rate: str = "learning_rate"
    seed: str | None = None
    first_seed: int = 0
    done: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values; see docs/bundle.md."""
        schedule = schedule_to_json(self.schedule)
        numbers = {"rate": self.rate, "seed": self.seed, "first_seed": self.first_seed, "done": self.done}
        return {"loss": self.loss, **numbers, "schedule": schedule}

    @classmethod
    def from_json(cls, table: Fields) -> TrainingManifest:
        """What `to_json` gave. Raises the table's error for fields that are missing or do not fit."""
        schedule = schedule_from_json(table.fields("schedule"))
        seed, first = table.text_or_none("seed"), table.whole("first_seed")
        return cls(table.text("loss"), schedule, table.text("rate"), seed, first, table.whole("done"))
