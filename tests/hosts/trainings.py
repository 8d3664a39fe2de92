"""A training on two hosts that loses a rank, is terminated, and finishes: ``python -m tests.hosts.trainings BUNDLE``.

Run in namespaces. Each launch after the first resumes from the last checkpoint. Prints one line of JSON: the exit code,
the lines and the seconds to the end of each launch by its name, and the steps and losses of the log.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distir_relax.bundle import BundleFile
from distir_relax.cli.training_data import load_data
from distir_relax.runtime.training.callbacks import Callback, StepResult
from distir_relax.runtime.training.options import TrainOptions
from distir_relax.runtime.training.train import Run, train
from tests.hosts.laboratory import Laboratory
from tests.hosts.launches import DATA, Failure, Training, TrainingLaunch, inflict

HOSTS = "n0:2,n1:1"
STEPS, EVERY = 200, 5
"""Steps of the training, and between its checkpoints: those of slow batches would take ten seconds."""


class Losses(Callback):
    """The losses of a run, after their steps."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self.losses.append((result.step, result.loss))


def losses_on_one_machine(bundle: Path, steps: int) -> list[tuple[int, float]]:
    """Train with threads as ranks, and return the losses after their steps."""
    found = Losses()
    train(Run(BundleFile(bundle), load_data(f"{DATA}:batches"), TrainOptions(steps), [found]))
    return found.losses


def main() -> None:
    """Run the launches, and print the line."""
    bundle, ends = Path(sys.argv[1]), {}
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), shared=[bundle.parent]) as laboratory:
        training = Training(bundle, Path(folder), STEPS, EVERY)
        # The /tmp of a host is its own.
        elsewhere = replace(training, folder=Path("/tmp"))

        def launch(of: Training, batches: str, act: Callable[[TrainingLaunch], object], resume: str) -> dict[str, Any]:
            started = TrainingLaunch(laboratory, HOSTS, of, batches, 30, resume)
            act(started)
            begin = time.monotonic()
            return {"code": started.wait(40), "ended": time.monotonic() - begin, "text": started.text()}

        def kill(started: TrainingLaunch) -> None:
            started.wait_for("wrote ")
            inflict(laboratory, Failure("kill", "n1"), started)

        def terminate(started: TrainingLaunch) -> None:
            started.wait_for("resumed from ")
            started.process.send_signal(signal.SIGTERM)

        def terminate_early(started: TrainingLaunch) -> None:
            until = time.monotonic() + 30
            while time.monotonic() < until and not laboratory.pids_of("n1", started.rank):
                time.sleep(0.02)
            started.process.send_signal(signal.SIGTERM)

        def nothing(started: TrainingLaunch) -> None:
            pass

        ends["killed"] = launch(training, "slow", kill, "")
        ends["terminated"] = launch(training, "very_slow", terminate, "last")
        ends["terminated early"] = launch(training, "slow", terminate_early, "last")
        ends["finished"] = launch(training, "batches", nothing, "last")
        ends["no common disk"] = launch(elsewhere, "batches", nothing, "")
        left = {name: len(laboratory.pids(name)) for name in laboratory.names}
        print(json.dumps({"ends": ends, "losses": training.losses(), "left": left}))


if __name__ == "__main__":
    main()
