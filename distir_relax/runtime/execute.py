"""Single execution of a bundle: in memory, or from files to a file, with or without mpirun or torchrun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, BundleFile
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.inputs import atomic_file, check_writable, write_npz
from distir_relax.runtime.launched import RankOptions, ending_launch, open_session
from distir_relax.runtime.npz import read_npz
from distir_relax.runtime.progress import Traffic
from distir_relax.runtime.report import RunReport, make_report
from distir_relax.runtime.sequence_calls import SequenceCalls
from distir_relax.runtime.session import Session
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import ALONE, World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


@dataclass(frozen=True)
class RunOptions:
    """Options of `distir run`: files to read and write, and how to run."""

    bundle: BundleFile
    input: Path | None = None
    output: Path | None = None
    ranks: RankOptions = field(default_factory=RankOptions)
    repeat: int = 1
    report: Path | None = None


def run_bundle(
    bundle: Bundle, inputs: Mapping[str, Array], backend: str = "torch", device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run once with all ranks as threads of this process: global inputs to global outputs.

    Raises what `Session` raises.
    """
    return Session(bundle, backend, device, timeout)(inputs)


def run(options: RunOptions, world: World = ALONE) -> RunReport | None:
    """Run `distir run` as one rank of a launch, or alone; return the report on rank 0, None elsewhere.

    The output is written completely or not at all. A `DistIRError` in reading the bundle and the inputs is raised on
    all ranks alike (`open_session`). A later error of one rank is printed and ends the launch (`ending_launch`).
    """
    with ending_launch(world):
        prepare = partial(_prepare, options, world.rank == 0)
        session, inputs = open_session(world, options.bundle, options.ranks, prepare)
        outputs, seconds = _timed_runs(session, inputs, options.repeat)
        of_ranks = [[c.traffic.calls, c.traffic.bytes, c.progress.tasks] for c in session.communicators]
        everyone: list[Any] = world.exchange([seconds, of_ranks])
        rows = [row for _, of_process in everyone for row in of_process]
        report = make_report(
            session.bundle.manifest,
            options.ranks.backend,
            world.kind,
            [max(times) for times in zip(*(theirs for theirs, _ in everyone), strict=True)],
            [Traffic(calls, sent) for calls, sent, _ in rows],
            [tasks for *_, tasks in rows],
        )
        with agreed(world):
            if world.rank == 0:
                _write(options, outputs, report)
        return report if world.rank == 0 else None


def _prepare(options: RunOptions, writes: bool, bundle: Bundle) -> dict[str, Any]:
    """Check the inputs and return them, after checking that the outputs can be written on the rank that `writes`."""
    inputs: dict[str, Any] = {} if options.input is None else dict(read_npz(options.input))
    encoding, prepared = SequenceCalls(bundle).of(inputs)
    inputs = {**(encoding.inputs if encoding is not None else {}), **prepared.inputs}
    for target in (options.output, options.report):
        if target is not None and writes:
            check_writable(target)
    return inputs


def _timed_runs(
    session: Session, inputs: Mapping[str, Array], repeat: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Run `repeat` times, with one more run as warm-up if there are several; return the last outputs and the times."""
    seconds = []
    for _ in range(repeat + 1 if repeat > 1 else 1):
        outputs = session(inputs)
        seconds.append(session.seconds)
    return outputs, seconds[1:] if repeat > 1 else seconds


def _write(options: RunOptions, outputs: Mapping[str, torch.Tensor], report: RunReport) -> None:
    if options.output is not None:
        write_npz(options.output, outputs)
    if options.report is not None:
        with atomic_file(options.report) as temporary:
            temporary.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
