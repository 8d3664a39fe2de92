"""Single execution of a bundle: in memory, or from files to a file, with or without mpirun or torchrun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.inputs import atomic_file, check_writable, write_npz
from distir_relax.runtime.launched import ending_launch, load_rank
from distir_relax.runtime.npz import read_npz
from distir_relax.runtime.progress import Traffic
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.report import RunReport, make_report
from distir_relax.runtime.sequence_calls import SequenceCalls
from distir_relax.runtime.session import Session
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


@dataclass(frozen=True)
class RunOptions:
    """Options of `distir run`: files to read and write, and how to run."""

    bundle: Path
    input: Path | None = None
    output: Path | None = None
    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT
    repeat: int = 1
    report: Path | None = None
    weights: Path | None = None
    trust_code: bool = False
    require_signature: Path | None = None


def run_bundle(
    bundle: Bundle, inputs: Mapping[str, Array], backend: str = "torch", device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run once with all ranks as threads of this process: global inputs to global outputs.

    Raises what `Session` raises.
    """
    return Session(bundle, backend, device, timeout)(inputs)


def run_threads(options: RunOptions) -> RunReport:
    """Run `distir run` with ranks as threads. Raises DistIRError; the output is written completely or not at all."""
    bundle = read_bundle(
        options.bundle, weights=options.weights, trust_code=options.trust_code,
        require_signature=options.require_signature,
    )  # fmt: skip
    inputs = _prepare(options, bundle)
    session = Session(bundle, options.backend, options.device, options.timeout)
    outputs, seconds = _timed_runs(session, inputs, options.repeat)
    traffic = [comm.traffic for comm in session.communicators]
    tasks = [comm.progress.tasks for comm in session.communicators]
    report = make_report(bundle.manifest, options.backend, "threads", seconds, traffic, tasks)
    _write(options, outputs, report)
    return report


def run_rank(world: World, options: RunOptions) -> RunReport | None:
    """Run `distir run` as one rank of a launch; return the report on rank 0, None elsewhere.

    A `DistIRError` in reading the bundle and the inputs is raised on all ranks alike (`load_rank`). A later error of
    one rank is printed and ends the launch (`ending_launch`).
    """
    with ending_launch(world):
        session, inputs = load_rank(
            world,
            options.bundle,
            options.backend,
            options.device,
            lambda bundle: _prepare(options, bundle),
            weights=options.weights,
            trust_code=options.trust_code,
            require_signature=options.require_signature,
        )
        manifest = session.bundle.manifest
        outputs, seconds = _timed_runs(session, inputs, options.repeat)
        traffic = session.communicator.traffic
        everyone: list[Any] = world.exchange(
            [seconds, traffic.calls, traffic.bytes, session.communicator.progress.tasks]
        )
        report = make_report(
            manifest,
            options.backend,
            world.kind,
            [max(times) for times in zip(*(theirs[0] for theirs in everyone), strict=True)],
            [Traffic(calls, sent) for _, calls, sent, _ in everyone],
            [tasks for *_, tasks in everyone],
        )
        with agreed(world):
            if world.rank == 0:
                _write(options, outputs, report)
        return report if world.rank == 0 else None


def _prepare(options: RunOptions, bundle: Bundle) -> dict[str, Any]:
    """Check the inputs and return them, after checking that the outputs can be written."""
    inputs: dict[str, Any] = {} if options.input is None else dict(read_npz(options.input))
    encoding, prepared = SequenceCalls(bundle).of(inputs)
    inputs = {**(encoding.inputs if encoding is not None else {}), **prepared.inputs}
    for target in (options.output, options.report):
        if target is not None:
            check_writable(target)
    return inputs


def _timed_runs(
    session: Session | RankSession, inputs: Mapping[str, Array], repeat: int
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
