"""Training steps with collectives in program order and overlapped, in turn: the time saved, measured and predicted.

    python benchmarks/overlap.py                                  # two ranks that sum in shared memory
    python benchmarks/overlap.py --transport gloo                 # two ranks of torchrun
    python benchmarks/overlap.py --transport gloo --latency 1e-3 --bandwidth 2e8   # and a network that takes so long
    python benchmarks/overlap.py --transport sleep --latency 1e-3 --bandwidth 2e8 --profile cpu-local

The slow network executes one all-reduce after the other, and ranks that wait for it sleep. The prediction needs a
profile of the machine, of `distir calibrate -n 2`. Its all-reduces are replaced by those that are measured in the same
run, and its devices slowed down until the step in order takes as long as measured: what is predicted is the overlap.
With ``--transport sleep`` ranks are threads that sleep as long as the profile says that an op takes, and in which only
the communication runs, so that a busy machine gives the same times.
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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import training_validation as models

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Level, Profile, load_profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.frontends.torch.loss_module import call_arguments
from distir_relax.ir import Function, Module
from distir_relax.ops import Trait, evaluate, lookup
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.join import join_world
from distir_relax.runtime.launch import find_mpirun, mpirun_command
from distir_relax.runtime.session import Session
from distir_relax.runtime.started_collectives import Started
from distir_relax.runtime.transports.threads import RankThreads, ThreadCommunicator, ThreadWorld
from distir_relax.runtime.transports.torch_distributed import TorchCommunicator

MODELS = {"gpt2": models.gpt2, "llama": models.llama, "mlp": models.mlp}
SIZES = {"in order": 0.0, "overlapped": 4e6}
PROBES = {"small": 1 << 14, "large": 1 << 22}
"""Bytes of all-reduces that are measured alone."""
WARM_UP = 3


def main() -> None:
    options = _options()
    if options.folder:
        _run_rank(Path(options.folder), options)
        return
    warnings.simplefilter("ignore")
    for name in options.models.split(","):
        with TemporaryDirectory() as folder:
            plans = _save(MODELS[name], options.strategy, Path(folder))
            if options.transport == "sleep":
                print(f"{name:6} {options.strategy}: {_compare_asleep(plans, options)}", flush=True)
                continue
            measured = _launch(Path(folder), options)
        before, after = (1e3 * statistics.median(measured[mode]) for mode in SIZES)
        pairs = zip(measured["in order"], measured["overlapped"], strict=True)
        saved = 1e3 * statistics.median(a - b for a, b in pairs)
        line = f"{name:6} {options.strategy}: in order {before:6.1f} ms, overlapped {after:6.1f} ms"
        line += f", saved {saved:6.1f} ms"
        if options.profile:
            a, b = _predict(plans, load_profile(options.profile), measured, before / 1e3)
            line += f"; predicted {1e3 * a:6.1f}, {1e3 * b:6.1f}, saved {1e3 * (a - b):6.1f} ms"
        print(line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,mlp", help="some of gpt2, llama, mlp")
    parser.add_argument("--strategy", default="2/1/1/1", help="a strategy of two devices")
    parser.add_argument("--transport", default="mpi", choices=("mpi", "gloo", "sleep"))
    parser.add_argument("--pairs", default=25, type=int, help="pairs of steps")
    parser.add_argument("--latency", default=0.0, type=float, help="seconds that each all-reduce takes longer")
    parser.add_argument("--bandwidth", default=0.0, type=float, help="bytes that it moves in a second of that")
    parser.add_argument("--profile", help="a profile of this machine, to predict the steps too")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _predict(
    plans: dict[str, dr.Plan], profile: Profile, measured: dict[str, list[float]], target: float
) -> tuple[float, float]:
    """Return the predicted seconds in order and overlapped; those in order are `target`."""
    small, large = measured["small"][0], measured["large"][0]
    seconds_per_byte = (large - small) / (PROBES["large"] - PROBES["small"])
    # Of the formulas for two ranks, that of a doubling all-reduce is the time of one message.
    level = Level("measured", 2, max(0.0, small - PROBES["small"] * seconds_per_byte), 1.0 / seconds_per_byte)
    lines = tuple(line for line in profile.lines if line.collective != "all_reduce")
    machine = replace(profile, levels=(level,), lines=lines, collective_overhead=0.0)

    def seconds(mode: str, speed: float) -> float:
        return dr.simulate(plans[mode], profile=replace(machine, groups=(Group(((0, 1),), speed),))).makespan

    low, high = 0.05, 20.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds("in order", middle) > target else (low, middle)
    return seconds("in order", low), seconds("overlapped", low)


def _save(make: Callable[[], models.Made], strategy: str, folder: Path) -> dict[str, dr.Plan]:
    """Save a bundle for each mode, and its inputs; return the plans."""
    plans = {}
    for mode, size in SIZES.items():
        torch.manual_seed(0)
        model, loss, batch = make()
        step = dr.compile_training(
            model, loss, optimizer=dr.optim.AdamW(lr=1e-4), example_batch=batch, strategy=strategy, overlap=size
        )
        step.save(folder / mode)
        tensors = step.plan.imported.flatten(*call_arguments(*batch, loss is not None))
        torch.save(step.numbers(tensors), folder / "inputs.pt")
        plans[mode] = step.plan
    return plans


def _launch(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run the bundles on two ranks; return the seconds of each step of the slower rank, and of all-reduces alone."""
    own = [__file__, "--folder", str(folder), "--pairs", str(options.pairs)]
    own += ["--latency", str(options.latency), "--bandwidth", str(options.bandwidth)]
    if options.transport == "mpi":
        command = mpirun_command(find_mpirun(), 2, [sys.executable, *own], "1")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *own]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = json.loads((folder / "seconds.json").read_text())
    return seconds


def _compare_asleep(plans: dict[str, dr.Plan], options: argparse.Namespace) -> str:
    """Run the programs with ops that sleep, and simulate them; return both as text."""
    level = Level("network", 2, options.latency, options.bandwidth)
    profile = replace(load_profile(options.profile), levels=(level,), lines=(), cache=0.0, collective_overhead=0.0)
    measured, predicted = {}, {}
    for mode, plan in plans.items():
        taken = [max(_run_asleep(plan, profile)) for _ in range(options.pairs)]
        measured[mode], predicted[mode] = statistics.median(taken), dr.simulate(plan, profile=profile).makespan
    parts = []
    for kind, found in (("measured", measured), ("predicted", predicted)):
        a, b = (1e3 * found[mode] for mode in SIZES)
        parts.append(f"{kind} in order {a:6.1f} ms, overlapped {b:6.1f} ms, saved {a - b:6.1f} ms")
    return "; ".join(parts)


def _run_asleep(plan: dr.Plan, profile: Profile) -> list[float]:
    """Run each rank's program once in a thread; return the seconds of each."""
    module = plan.modules["ranked"]
    world = _SlowWorld(module.meshes[0], profile.levels[0])
    seconds = [0.0] * len(module.ranks)

    def run(rank: int) -> None:
        comm = world.communicator(rank)
        comm.barrier()
        begin = time.perf_counter()
        until = _run_function(module, module.function(module.ranks[rank]), comm, profile, begin)
        _sleep_until(until)
        seconds[rank] = time.perf_counter() - begin

    ranks = RankThreads([partial(run, rank) for rank in range(len(module.ranks))])
    ranks.start()
    assert ranks.wait(60), "a rank hangs"
    return seconds


def _run_function(module: Module, function: Function, comm: Communicator, profile: Profile, until: float) -> float:
    """Run the communication of a function; its other ops take their time from the moment `until`, which is returned."""
    started: dict[str, Any] = {}
    for op in function.ops:
        if op.callee:
            until = _run_function(module, module.function(op.callee), comm, profile, until)
            continue
        entry = lookup(op.name)
        if Trait.COMMUNICATES not in entry.traits:
            types, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
            until += op_seconds(profile, entry, types, op.attrs, results)
            continue
        _sleep_until(until)
        operands = [started.get(v.name, torch.empty(v.tensor.shape)) for v in op.operands]
        (started[op.results[0].name],) = evaluate(op, operands, comm)
        until = time.perf_counter()
    return until


class _SlowWorld(ThreadWorld):
    """Ranks on a network that takes a time for each byte, and no processor."""

    def __init__(self, mesh: dr.DeviceMesh, level: Level) -> None:
        super().__init__(mesh)
        self.level = level

    def communicator(self, rank: int, device: str = "cpu", channel: str = "program") -> ThreadCommunicator:
        return _SlowCommunicator(self, rank, device, channel)


class _SlowCommunicator(ThreadCommunicator):
    def all_reduce(self, x: Any, axis: str, op: str, step: Any = None, out: Any = None) -> Any:
        level = self._world.level  # type: ignore[attr-defined]
        self._meet(self.mesh.axes.index(axis), None)
        if _is_shared(self, axis):
            time.sleep(level.latency + x.nbytes / level.bandwidth)
        return x


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _run_rank(folder: Path, options: argparse.Namespace) -> None:
    """Run the steps in turn as one rank, and write the seconds of all."""
    world = join_world()
    assert world is not None, "not started by a launcher"
    torch.set_num_threads(1)
    if options.bandwidth:
        _slow_down(options.latency, options.bandwidth)
    sessions = {mode: Session(read_bundle(folder / mode), world=world) for mode in SIZES}
    inputs = torch.load(folder / "inputs.pt")
    seconds: dict[str, list[float]] = {mode: [] for mode in SIZES}
    for number in range(WARM_UP + options.pairs):
        for mode in (SIZES, reversed(SIZES))[number % 2]:
            sessions[mode](inputs, outputs=())
            seconds[mode].append(sessions[mode].seconds)
    communicator = sessions["in order"].communicator
    probes = {name: [_time_all_reduce(communicator, size)] for name, size in PROBES.items()}
    every = world.exchange(seconds)
    if world.rank == 0:
        slowest = {mode: [max(each) for each in zip(*(of[mode] for of in every), strict=True)] for mode in SIZES}
        text = json.dumps({mode: taken[WARM_UP:] for mode, taken in slowest.items()} | probes)
        (folder / "seconds.json").write_text(text)
    world.exit()


def _time_all_reduce(communicator: Communicator, size: int) -> float:
    """Return the median seconds of an all-reduce of `size` bytes."""
    x, taken = torch.ones(size // 4), []
    for _ in range(9):
        communicator.barrier()
        begin = time.perf_counter()
        communicator.all_reduce(x, communicator.mesh.axes[0], "sum")
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _slow_down(latency: float, bandwidth: float) -> None:
    """Let every all-reduce take longer, as on a network, which is busy with those before it."""
    free_at = 0.0

    def end(x: torch.Tensor) -> float:
        nonlocal free_at
        free_at = max(free_at, time.perf_counter()) + latency + x.nbytes / bandwidth
        return free_at

    in_order: Any = TorchCommunicator.all_reduce
    start: Any = TorchCommunicator._start_all_reduce

    def slow(self: Communicator, x: torch.Tensor, axis: str, *arguments: Any, **more: Any) -> Any:
        result = in_order(self, x, axis, *arguments, **more)
        if _is_shared(self, axis):
            _sleep_until(end(x))
        return result

    def start_slowly(self: Communicator, x: torch.Tensor, axis: str, op: str, step: Any) -> Started:
        started = start(self, x, axis, op, step)
        moment = end(x) if _is_shared(self, axis) else 0.0

        def result() -> Any:
            found = started.result()
            _sleep_until(moment)
            return found

        return Started(result)

    TorchCommunicator.all_reduce = slow  # type: ignore[method-assign]
    TorchCommunicator._start_all_reduce = start_slowly  # type: ignore[method-assign]


def _is_shared(communicator: Communicator, axis: str) -> bool:
    return communicator.mesh.shape[communicator.mesh.axes.index(axis)] > 1


if __name__ == "__main__":
    main()
