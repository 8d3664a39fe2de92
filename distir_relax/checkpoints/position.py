"""Position of a training run: its steps, its place in the data, and what its tensors are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distir_relax.support import Fields


@dataclass(frozen=True)
class DataPosition:
    """Place of a run in its data: `batches` were read, `place` of them, with `samples`, in the present epoch.

    `epoch` counts the complete epochs. It is None if only the number of batches is known, and for data without epochs.
    `rows` are the samples of a typical batch: if a resumed run has others, its data continue by samples.
    """

    batches: int = 0
    epoch: int | None = None
    place: int = 0
    samples: int = 0
    rows: int = 0

    def after(self, samples: int) -> DataPosition:
        """Return the position after another batch."""
        return replace(self, batches=self.batches + 1, place=self.place + 1, samples=self.samples + samples)

    def next_epoch(self) -> DataPosition:
        """Return the position at the start of the next epoch."""
        return replace(self, epoch=None if self.epoch is None else self.epoch + 1, place=0, samples=0)

    @classmethod
    def from_json(cls, table: Fields) -> DataPosition:
        """Parse the fields as JSON. Raises the table's error for fields that are missing or do not fit."""
        epoch = None if table.table.get("epoch") is None else table.whole("epoch")
        batches, place, samples, rows = map(table.whole, ("batches", "place", "samples", "rows"))
        return cls(batches, epoch, place, samples, rows)


START = DataPosition()
"""The position before the first batch."""


@dataclass(frozen=True)
class Position:
    """Position of a run: steps done, samples seen, random seed, and the program's identity.

    Steps count from the first one of the weights, as learning rates and seeds of dropout do. `data` is the position in
    the data. `rates` are its learning rates as JSON; a run uses those of its bundle. `metrics` are those
    by which the run keeps its best checkpoint. `frozen` has the SHA-256 of each parameter and buffer that the program
    does not change, `held` the names of those that the checkpoint has, too: they were trained before. `fixed` has the
    SHA-256 of buffers and tensor attributes of the model, and `settings` the options of its compilation, as in a
    `TrainingManifest`.
    """

    step: int
    samples: int
    seed: int
    program: str
    rates: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: DataPosition = START
    frozen: Mapping[str, str] = field(default_factory=dict)
    held: Sequence[str] = ()
    callbacks: Sequence[Mapping[str, Any]] = ()
    """The states of callbacks: the name of a class, and its state."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    order: Mapping[str, str] = field(default_factory=dict)
    """Settings that the order of the samples in an epoch follows from, besides the seed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Fields) -> Position:
        """Parse the result of `to_json`. Raises the table's error for fields that are missing or do not fit."""
        rates = table.fields("rates").table
        metrics = {k: value for k, value in table.fields("metrics").table.items() if isinstance(value, (int, float))}
        step, samples, seed = map(table.whole, ("step", "samples", "seed"))
        data, frozen = DataPosition.from_json(table.fields("data")), table.by_name("frozen")
        rows = table.rows("callbacks")
        callbacks = tuple({"name": row.text("name"), "state": row.fields("state").table} for row in rows)
        program, held = table.text("program"), table.texts("held")
        others = map(table.by_name, ("fixed", "settings", "order"))
        return cls(step, samples, seed, program, rates, metrics, data, frozen, held, callbacks, *others)
