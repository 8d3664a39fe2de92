"""The paper's six grid searches, and what they found, kept in files: a search that was stopped goes on from there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distir_relax import Strategy, load_profile
from distir_relax.compiler.inputs import classify_input
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.strategy_search import Outcome, Search, Space, search_grid

from . import models

ROOT = Path(__file__).parents[2]
MACHINE = "dgx2-v100"
DEVICES = 16
PURE = {"data": "16/1/1/1", "tensor": "1/16/1/1", "pipeline": "1/1/16/128"}
"""The paper's baselines; its pipelines have 128 microbatches, 8 for each stage."""


def powers(first: int, last: int) -> tuple[int, ...]:
    """The powers of two from one to the other."""
    return tuple(1 << n for n in range(first.bit_length() - 1, last.bit_length()))


@dataclass(frozen=True)
class Grid:
    """One search: its model, as the paper calls it, the function that makes it, and the batches.

    All D x T x P of `devices`; pipelines with 2 to 128 microbatches, all else with one. That are 75 configurations for
    each batch that is large enough.
    """

    model: str
    build: Callable[[int], Any]
    batches: tuple[int, ...]
    devices: int = DEVICES

    @property
    def space(self) -> Space:
        """What is tried. Microbatches without a pipeline, which training could have, are not in the paper's grid."""
        return Space(self.devices, self.batches, trained=False)

    def read(self) -> Source:
        """The model, with a batch larger than any that is asked for."""
        options = CompileOptions(profile=load_profile(MACHINE))
        return classify_input(self.build(2 * max(self.batches))).read(options)


GRIDS = (
    Grid("MLP 1B", models.mlp_1b, powers(128, 262144)),
    Grid("MLP 17B", models.mlp_17b, powers(128, 262144)),
    Grid("MLP 103B", models.mlp_103b, powers(128, 262144)),
    Grid("GPT-2 1.6B", models.gpt2_1_6b, powers(128, 1048576)),
    Grid("GPT-2 13B", models.gpt2_13b, powers(128, 1048576)),
    Grid("GPT-2 175B", models.gpt2_175b, powers(128, 1048576)),
)


@dataclass(frozen=True)
class Timed:
    """How long it took to compile and simulate one configuration, and how many ops that were, one on one device each
    (`device_ops`)."""

    strategy: str
    samples: int
    device_ops: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """What a search found of a model with so many `parameters`, whose step has so many `ops` on one device.

    `seconds` is what reading the model in and simulating all configurations took on `cores` cores, in as many runs as
    it was done in. `timed` are some of the configurations, simulated one by one.
    """

    grid: Grid
    search: Search
    parameters: int
    ops: int
    seconds: float
    cores: int
    timed: tuple[Timed, ...]

    @property
    def model(self) -> str:
        """The paper's name of the model."""
        return self.grid.model

    def outcome(self, strategy: str, batch: int) -> Outcome | None:
        """What was found of a configuration; None where it is not in the grid, or does not fit."""
        found = (o for o in self.search.outcomes if (o.strategy, o.samples) == (strategy, batch))
        outcome = next(found, None)
        return outcome if outcome is not None and outcome.fits else None

    def best_of(self, strategy: str, most: int) -> Outcome | None:
        """The fastest batch of a strategy, of those up to `most` that fit; of all strategies if it is empty."""
        fitting = (o for o in self.search.ranked if o.samples <= most)
        return next((o for o in fitting if strategy in ("", o.strategy)), None)


def code_digest() -> str:
    """A name for the code that results depend on: those of other code are not used again."""
    package = sorted(p for p in (ROOT / "distir_relax").rglob("*") if p.suffix in (".py", ".toml"))
    digest = hashlib.sha256()
    for path in (*package, Path(models.__file__), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run(grid: Grid, folder: Path, samples: int = 24) -> Found:
    """Search, or read what an earlier search left in `folder`, whole or in part; time `samples` configurations alone.

    Raises `DistIRError` where a file there is of another search, and as searches do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = grid.model.lower().replace(" ", "-")
    notes, kept = folder / f"{name}.json", folder / f"{name}.jsonl"
    known = json.loads(notes.read_text()) if notes.exists() else {}
    if "timed" in known:
        rows = (json.loads(line) for line in kept.read_text().splitlines()[1:])
        outcomes = {o.candidate: o for o in map(Outcome.from_row, rows)}
        order = tuple(outcomes[candidate] for candidate in grid.space.candidates())
        search = Search(grid.space, load_profile(MACHINE), order)
    else:
        search, known = _searched(grid, kept, notes, known.get("seconds", 0.0), samples)
    timed = tuple(Timed(**row) for row in known["timed"])
    return Found(grid, search, known["parameters"], known["ops"], known["seconds"], known["cores"], timed)


def _searched(
    grid: Grid, kept: Path, notes: Path, before: float, samples: int
) -> tuple[Search, dict[str, Any]]:  # fmt: skip
    start = time.perf_counter()
    try:
        source = grid.read()
        search = search_grid(source, load_profile(MACHINE), grid.space, resume=kept)
    finally:
        seconds = before + time.perf_counter() - start
        notes.write_text(json.dumps({"seconds": seconds}))
    weights = [i.value.tensor for i in source.imported.module.main.inputs if i.role == "parameter"]
    alone = source.with_strategy(Strategy()).simulate(search.profile, min(grid.batches))
    known = {
        "seconds": seconds, "cores": os.cpu_count(), "ops": alone.device_ops,
        "parameters": sum(math.prod(t.shape) for t in weights),
        "timed": [asdict(one) for one in _timed(source, search, samples)],
    }  # fmt: skip
    notes.write_text(json.dumps(known))
    return search, known


def _timed(source: Source, search: Search, samples: int) -> list[Timed]:
    """Configurations evenly over the grid, each compiled and simulated by itself, as if no other had been."""
    simulated = [o for o in search.outcomes if not o.refused]
    chosen = simulated[:: max(1, len(simulated) // samples)]
    found = []
    for outcome in chosen:
        start = time.perf_counter()
        simulation = source.with_strategy(outcome.candidate.strategy).simulate(search.profile, outcome.samples)
        seconds = time.perf_counter() - start
        found.append(Timed(outcome.strategy, outcome.samples, simulation.device_ops, seconds))
    return found
