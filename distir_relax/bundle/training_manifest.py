"""Training section of the manifest: the loss output, and the inputs that are not data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distir_relax.support import Fields
from distir_relax.support.learning_rate import Schedule, schedule_from_json, schedule_to_json


@dataclass(frozen=True)
class TrainingManifest:
    """A training step: the output that is its loss, and the inputs that are not data.

    `rate` is the input for the learning rate, a float64 scalar, set from `schedule` at each step. `seed` is the input,
    if any, for the step's random seed, an int64: `first_seed` plus the step number. `done` is the number of steps made
    before the bundle was written.
    """

    loss: str
    schedule: Schedule
    rate: str = "learning_rate"
    seed: str | None = None
    first_seed: int = 0
    done: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values; see docs/bundle.md."""
        schedule = schedule_to_json(self.schedule)
        numbers = {"rate": self.rate, "seed": self.seed, "first_seed": self.first_seed, "done": self.done}
        return {"loss": self.loss, **numbers, "schedule": schedule}

    @classmethod
    def from_json(cls, table: Fields) -> TrainingManifest:
        """Parse the result of `to_json`. Raises the table's error for fields that are missing or do not fit."""
        schedule = schedule_from_json(table.fields("schedule"))
        seed, first = table.text_or_none("seed"), table.whole("first_seed")
        return cls(table.text("loss"), schedule, table.text("rate"), seed, first, table.whole("done"))
