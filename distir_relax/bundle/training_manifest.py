"""Training section of the manifest: the loss output, and the inputs that are not data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distir_relax.support import Fields
from distir_relax.support.learning_rate import Schedule, schedule_from_json, schedule_to_json

AVERAGED = ".averaged"
"""Suffix of a weight of a training step that is the average of another one."""
STEP_COUNT = "optimizer.step"
"""The weight of a training step, an int64 scalar, that counts the steps of its optimizer."""
OWN_STEP = "step"
"""The state of a parameter that counts its own updates, an int64 scalar."""


@dataclass(frozen=True)
class TrainingManifest:
    """A training step: the output that is its loss, and the inputs that are not data.

    `rates` are the inputs for learning rates, float64 scalars, each set by its schedule at each step. `seed` is the
    input, if any, for the step's random seed, an int64: `first_seed` plus the step number. `done` is the number of
    steps made before the bundle was written. `evaluated` are the outputs of the evaluation, scalars, if the bundle has
    one. `names` maps the model's names of its parameters, and of the buffers that training changes, to weights.
    `gradient_norm` is the output, if any, with the norm of the gradients before clipping. `buffers` are those of
    the model that training does not change, whether the program has them or not. `losses` are the outputs with the
    losses of a step of several updates, of which the first is `loss`. `fixed` has the SHA-256 of each buffer and tensor
    attribute that the model reads and training does not change, whether they are weights or folded into the program.
    `settings` are texts by name that a resumed run is compared by: the kinds of optimizers, and `clip_norm`.
    """

    loss: str
    rates: Mapping[str, Schedule]
    seed: str | None = None
    first_seed: int = 0
    done: int = 0
    evaluated: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    """Those of the outputs `evaluated` that are of all batches so far; others are means over a batch."""
    names: Mapping[str, str] = field(default_factory=dict)
    gradient_norm: str | None = None
    buffers: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; see docs/bundle.md."""
        rates = {name: schedule_to_json(schedule) for name, schedule in self.rates.items()}
        numbers = {"seed": self.seed, "first_seed": self.first_seed, "done": self.done}
        return {
            "loss": self.loss,
            **numbers,
            "rates": rates,
            "evaluated": list(self.evaluated),
            "accumulated": list(self.accumulated),
            "names": dict(self.names),
            "gradient_norm": self.gradient_norm,
            "buffers": list(self.buffers),
            "losses": list(self.losses),
            "fixed": dict(self.fixed),
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, table: Fields) -> TrainingManifest:
        """Parse the result of `to_json`. Raises the table's error for fields that are missing or do not fit."""
        rates = table.fields("rates")
        schedules = {name: schedule_from_json(rates.fields(name)) for name in rates.table}
        seed, first = table.text_or_none("seed"), table.whole("first_seed")
        evaluated, accumulated = table.texts("evaluated", []), table.texts("accumulated", [])
        return cls(
            table.text("loss"), schedules, seed, first, table.whole("done"), evaluated, accumulated,
            table.by_name("names"), table.text_or_none("gradient_norm"), table.texts("buffers", []),
            table.texts("losses", []), table.by_name("fixed"), table.by_name("settings"),
        )  # fmt: skip
