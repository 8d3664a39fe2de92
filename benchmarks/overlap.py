"""Training steps with collectives in program order and overlapped, in turn: the time saved, measured and predicted.

    python benchmarks/overlap.py                                  # two ranks that sum in shared memory
    python benchmarks/overlap.py --transport gloo                 # two ranks of torchrun
    python benchmarks/overlap.py --transport gloo --latency 1e-3 --bandwidth 2e8   # and a network that takes so long

The slow network executes one all-reduce after the other, and ranks that wait for it sleep. The prediction needs a
profile of the machine, of `distir calibrate -n 2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import training_validation as models

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.frontends.torch.loss_module import call_arguments
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.join import join_world
from distir_relax.runtime.launch import find_mpirun, mpirun_command
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.transports.torch_distributed import TorchCommunicator

MODELS = {"gpt2": models.gpt2, "llama": models.llama, "mlp": models.mlp}
SIZES = {"in order": 0.0, "overlapped": 4e6}
WARM_UP = 3


def main() -> None:
    options = _options()
    if options.folder:
        _run_rank(Path(options.folder), options)
        return
    warnings.simplefilter("ignore")
    profile = _profile(options)
    for name in options.models.split(","):
        with TemporaryDirectory() as folder:
            predicted = _save(MODELS[name], options.strategy, Path(folder), profile)
            measured = _launch(Path(folder), options)
        before, after = (1e3 * statistics.median(measured[mode]) for mode in SIZES)
        pairs = zip(measured["in order"], measured["overlapped"], strict=True)
        saved = 1e3 * statistics.median(a - b for a, b in pairs)
        line = f"{name:6} {options.strategy}: in order {before:6.1f} ms, overlapped {after:6.1f} ms"
        line += f", saved {saved:6.1f} ms"
        if predicted:
            a, b = (1e3 * predicted[mode] for mode in SIZES)
            line += f"; predicted {a:6.1f}, {b:6.1f}, saved {a - b:6.1f} ms"
        print(line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,mlp", help="some of gpt2, llama, mlp")
    parser.add_argument("--strategy", default="2/1/1/1", help="a strategy of two devices")
    parser.add_argument("--transport", default="mpi", choices=("mpi", "gloo"))
    parser.add_argument("--pairs", default=25, type=int, help="pairs of steps")
    parser.add_argument("--latency", default=0.0, type=float, help="seconds that each all-reduce takes longer")
    parser.add_argument("--bandwidth", default=0.0, type=float, help="bytes that it moves in a second of that")
    parser.add_argument("--profile", help="a profile of this machine, to predict the steps too")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _profile(options: argparse.Namespace) -> Profile | None:
    """Return the profile, with the slow network if there is one."""
    if options.profile is None:
        return None
    profile = load_profile(options.profile)
    if not options.bandwidth:
        return profile
    # Of the formulas for two ranks, that of a doubling all-reduce is the time of `_slow_down`.
    level = replace(profile.levels[-1], latency=options.latency, bandwidth=options.bandwidth, overlaps=True)
    others = tuple(line for line in profile.lines if line.collective != "all_reduce")
    return replace(profile, levels=(level,), lines=others)


def _save(make: Callable[[], models.Made], strategy: str, folder: Path, profile: Profile | None) -> dict[str, float]:
    """Save a bundle for each mode, and its inputs; return the predicted seconds of each."""
    predicted = {}
    for mode, size in SIZES.items():
        torch.manual_seed(0)
        model, loss, batch = make()
        step = dr.compile_training(
            model, loss, optimizer=dr.AdamW(lr=1e-4), example_batch=batch, strategy=strategy, overlap=size
        )
        step.save(folder / mode)
        tensors = step.plan.imported.flatten(*call_arguments(*batch, loss is not None))
        torch.save(step.numbers(tensors), folder / "inputs.pt")
        if profile is not None:
            predicted[mode] = dr.simulate(step.plan, profile=profile).makespan
    return predicted


def _launch(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run the bundles on two ranks; return the seconds of each step of the slower rank."""
    own = [__file__, "--folder", str(folder), "--pairs", str(options.pairs)]
    own += ["--latency", str(options.latency), "--bandwidth", str(options.bandwidth)]
    if options.transport == "mpi":
        command = mpirun_command(find_mpirun(), 2, [sys.executable, *own], "1")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *own]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = json.loads((folder / "seconds.json").read_text())
    return seconds


def _run_rank(folder: Path, options: argparse.Namespace) -> None:
    """Run the steps in turn as one rank, and write the seconds of all."""
    world = join_world()
    assert world is not None, "not started by a launcher"
    torch.set_num_threads(1)
    if options.bandwidth:
        _slow_down(options.latency, options.bandwidth)
    sessions = {mode: RankSession(world, read_bundle(folder / mode)) for mode in SIZES}
    inputs = torch.load(folder / "inputs.pt")
    seconds: dict[str, list[float]] = {mode: [] for mode in SIZES}
    for session in sessions.values():
        session.load()
    for number in range(WARM_UP + options.pairs):
        for mode in (SIZES, reversed(SIZES))[number % 2]:
            sessions[mode](inputs, outputs=())
            seconds[mode].append(sessions[mode].seconds)
    every = world.exchange(seconds)
    if world.rank == 0:
        slowest = {mode: [max(each) for each in zip(*(of[mode] for of in every), strict=True)] for mode in SIZES}
        text = json.dumps({mode: taken[WARM_UP:] for mode, taken in slowest.items()})
        (folder / "seconds.json").write_text(text)
    world.exit()


def _slow_down(latency: float, bandwidth: float) -> None:
    """Let every all-reduce take longer, as on a network, which is busy with those before it."""
    free_at = 0.0

    def end(x: torch.Tensor) -> float:
        nonlocal free_at
        free_at = max(free_at, time.perf_counter()) + latency + x.nbytes / bandwidth
        return free_at

    def sleep_until(moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))

    in_order: Any = TorchCommunicator.all_reduce
    start: Any = TorchCommunicator._start_all_reduce

    def slow(self: Communicator, x: torch.Tensor, axis: str, *arguments: Any, **more: Any) -> Any:
        result = in_order(self, x, axis, *arguments, **more)
        if _is_shared(self, axis):
            sleep_until(end(x))
        return result

    def start_slowly(self: Communicator, x: torch.Tensor, axis: str, op: str) -> Any:
        finish = start(self, x, axis, op)
        moment = end(x) if _is_shared(self, axis) else 0.0

        def finish_later() -> torch.Tensor:
            result: torch.Tensor = finish()
            sleep_until(moment)
            return result

        return finish_later

    TorchCommunicator.all_reduce = slow  # type: ignore[method-assign]
    TorchCommunicator._start_all_reduce = start_slowly  # type: ignore[method-assign]


def _is_shared(communicator: Communicator, axis: str) -> bool:
    return communicator.mesh.shape[communicator.mesh.axes.index(axis)] > 1


if __name__ == "__main__":
    main()
