"""Predicted against measured peaks of memory, on programs of many kinds: ``python -m benchmarks.peak_memory``.

Each program runs under mpirun on the ranks of its strategy; a rank's peak is what torch's allocator reports of a step,
its outputs assembled on rank 0 as in a call. The formulas of workspaces were fitted to `TUNED`; `UNSEEN` was measured
afterwards. Options: ``--only PATTERN`` and ``--limit PERCENT`` (the exit code is 1 if a peak is farther off).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch

import distir_relax as dr
from benchmarks.memory_programs import TUNED, UNSEEN, Program
from distir_relax.bundle import read_bundle
from distir_relax.calibration.memory_peak import step_peak
from distir_relax.frontends.torch.loss_module import call_arguments
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.launch import find_mpirun, mpirun_command
from distir_relax.runtime.machine import limit_threads
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import numbers
from distir_relax.support.units import size

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*")
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--rank", type=Path, nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        _rank(asked.rank)  # does not return
    worst = 0.0
    chosen = [program for program in (*TUNED, *UNSEEN) if fnmatchcase(program.name, asked.only)]
    for program, predicted, measured in peaks(chosen):
        ratios = [a / b - 1 for a, b in zip(predicted, measured, strict=True)]
        worst = max(worst, *map(abs, ratios))
        shown = "  ".join(
            f"{size(a)} of {size(b)} ({r:+.1%})" for a, b, r in zip(predicted, measured, ratios, strict=True)
        )
        print(f"{program.name:28} {program.strategy:20} {shown}", flush=True)
    print(f"at most {worst:.1%} off")
    return int(worst * 100 > asked.limit)


def peaks(programs: list[Program]) -> Iterator[tuple[Program, list[int], list[int]]]:
    """Yield each program with the predicted and the measured peak of each rank, in bytes; by number of ranks.

    Programs of as many ranks run in one launch, one after the other: ranks take longer to start than to run.
    """
    with tempfile.TemporaryDirectory() as name:
        for ranks in sorted({program.ranks for program in programs}):
            chosen = [program for program in programs if program.ranks == ranks]
            folders = [Path(name) / f"{ranks}-{number}" for number in range(len(chosen))]
            predicted = [_write(program, folder) for program, folder in zip(chosen, folders, strict=True)]
            program = [sys.executable, "-m", "benchmarks.peak_memory", "--rank", *map(str, folders)]
            # As `distir calibrate` measures: convolutions of one element take other ways with several threads.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = mpirun_command(find_mpirun(), ranks, program, "1")
            subprocess.run(command, check=True, cwd=ROOT, env=environment)
            for program, folder, expected in zip(chosen, folders, predicted, strict=True):
                yield program, expected, json.loads((folder / "peaks.json").read_text())


def _write(program: Program, folder: Path) -> list[int]:
    torch.manual_seed(0)
    model, args = program.model(), program.args()
    if program.loss is None:
        plan = dr.compile(model.eval(), args, strategy=program.strategy)
        plan.save(folder / "program.dist", ("torch",))
        inputs, outputs = plan.imported.flatten(args, {}), None
    else:
        step = dr.compile_training(
            model, program.loss, optimizer=dr.optim.AdamW(), example_batch=args, strategy=program.strategy
        )
        step.save(folder / "program.dist", ("torch",))
        plan = step.plan
        inputs = plan.imported.flatten(*call_arguments(*args, True))
        outputs = [plan.modules["global"].main.outputs[0].name]
    torch.save((inputs, outputs), folder / "inputs.pt")
    machine = dr.load_profile("cpu-local").with_devices(program.ranks)
    return [int(n) for n in dr.simulate(plan, profile=machine).peak_memory]


def _rank(folders: list[Path]) -> None:
    with joined_world() as world:
        limit_threads(world.local_size)
        for folder in folders:
            session = Session(read_bundle(folder / "program.dist"), world=world)
            inputs, outputs = torch.load(folder / "inputs.pt")
            if outputs:
                inputs |= numbers(session.bundle.manifest, 0)
            found = world.exchange(step_peak(session, inputs, outputs))
            if world.rank == 0:
                (folder / "peaks.json").write_text(json.dumps(found))
    world.exit()


if __name__ == "__main__":
    sys.exit(main())
