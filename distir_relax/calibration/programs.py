"""Whole programs of a calibration: torch models, trained and run, on one device and over all.

They are compiled as users' models are, so their computation and communication are typical. The measuring ranks read
bundles, so that each program is compiled once for all ranks and passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, read_bundle, write_bundle
from distir_relax.calibration.measure import WARM_UP, random_inputs, steps_within, time_steps
from distir_relax.calibration.models import attention_model, example, feed_forward_model
from distir_relax.compiler.compile import Plan, compile
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.training import compile_training
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module
from distir_relax.optimizers import SGD, AdamW
from distir_relax.runtime.backends import load_program
from distir_relax.runtime.session import Session
from distir_relax.runtime.transports.threads import ThreadWorld
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies.strategy import Strategy

if TYPE_CHECKING:
    from distir_relax.runtime.world import World

_STEPS = 6
# Layers, width, rows of a batch per device, microbatches, and the pipeline schedule.
_FEED_FORWARD = (
    (3, 250, 10, 1, "1f1b"), (3, 250, 42, 3, "zb-h1"), (3, 500, 10, 3, "gpipe"), (5, 900, 42, 1, "1f1b"),
)  # fmt: skip
# Blocks, width, samples of a batch per device, microbatches, and the pipeline schedule.
_ATTENTION = ((2, 120, 5, 1, "1f1b"), (1, 280, 10, 5, "1f1b"))


@dataclass(frozen=True)
class ProgramSample:
    """A program of the distributed stage, as its ranks run it, and its bundle."""

    name: str
    module: Module
    bundle: Bundle

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.bundle.manifest.mesh.size

    def simulate(self, profile: Profile) -> Simulation:
        """Simulate the program as it is measured: that of one device is called without a session around it."""
        return simulate_module(self.module, replace(profile, step=0.0) if self.devices == 1 else profile)


@cache
def programs(dtype: str, scale: int, ranks: int) -> tuple[ProgramSample, ...]:
    """Return programs of one device and, if there are several, of all `ranks`. `scale` multiplies the widths."""
    return tuple(make() for make in program_makers(dtype, scale, ranks))


def program_makers(dtype: str, scale: int, ranks: int) -> tuple[Callable[[], ProgramSample], ...]:
    """Return the functions that compile `programs`, each one of them."""
    makers: list[Callable[[], ProgramSample]] = [
        partial(_inference, layers, width * scale, rows, dtype)
        for layers, width, rows in ((5, 350, 5), (5, 350, 42), (3, 1250, 5), (3, 1250, 42))
    ]
    for count in dict.fromkeys((1, ranks)):
        for of_kind, sizes in ((_feed_forward, _FEED_FORWARD), (_attention, _ATTENTION)):
            for layers, width, rows, microbatches, schedule in sizes:
                for strategy in _strategies(count, microbatches, schedule):
                    depth = layers * strategy.pipeline
                    makers.append(partial(of_kind, depth, width * scale, strategy, rows * count, dtype))
    return tuple(makers)


def write_programs(folder: Path, dtype: str, scale: int, ranks: int) -> None:
    """Write the bundles of `programs`, for `time_programs`."""
    for number, sample in enumerate(programs(dtype, scale, ranks)):
        write_bundle(sample.bundle, folder / f"{dtype}-{number:03}.dist")


def time_programs(folder: Path, dtype: str, device: str, world: World, limit: float = math.inf) -> list[list[float]]:
    """Return the seconds of steps of each program; ranks of a launch run single-device programs at the same time.

    All ranks call this together, with the same `limit`, the seconds for the steps of a program.
    """
    times = []
    for path in sorted(folder.glob(f"{dtype}-*.dist")):
        bundle = read_bundle(path, verify_weights=False)
        if bundle.manifest.mesh.size == 1:
            times.append(_time_alone(bundle, device, world, limit))
        else:
            times.append(time_steps(world, Session(bundle, device=device, world=world), _STEPS, limit))
    return times


def _time_alone(bundle: Bundle, device: str, world: World, limit: float) -> list[float]:
    import torch

    comm = ThreadWorld(bundle.manifest.mesh).communicator(0, device)
    program = load_program("torch", bundle, 0, comm, device)
    tensors = random_inputs(bundle.manifest)
    inputs = [tensors[entry.name].to(device) for entry in bundle.manifest.inputs]
    world.exchange(0)

    def run(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            program(*inputs, sizes={})
            if device != "cpu":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return seconds

    return run(steps_within(limit, run(WARM_UP)[-1], _STEPS))


def _strategies(ranks: int, microbatches: int, schedule: str) -> list[Strategy]:
    """Return strategies over all ranks: data, tensor, and pipeline parallel."""
    if ranks == 1:
        return [Strategy(microbatches=microbatches)]
    return [
        Strategy(data=ranks, microbatches=microbatches),
        Strategy(tensor=ranks, microbatches=microbatches),
        Strategy(pipeline=ranks, microbatches=microbatches, schedule=schedule),
    ]


def _sample(plan: Plan, bundle: Bundle) -> ProgramSample:
    return ProgramSample(plan.name, fuse_for_ranks(plan.modules["distributed"]), bundle)


def _trained(name: str, model: Any, loss: Any, optimizer: Any, batch: Any, strategy: Strategy) -> ProgramSample:
    step = compile_training(
        model, loss, optimizer=optimizer, example_batch=batch, strategy=strategy, name=f"{name}, {strategy}"
    )
    return _sample(step.plan, step.bundle(("torch",)))


def _feed_forward(layers: int, width: int, strategy: Strategy, rows: int, dtype: str) -> ProgramSample:
    import torch.nn.functional as F

    batch = example((rows, width), dtype), example((rows, width), dtype)
    model = feed_forward_model(layers, width, dtype)
    return _trained(f"{layers} x {width}", model, F.mse_loss, SGD(lr=1e-4), batch, strategy)


def _attention(blocks: int, width: int, strategy: Strategy, rows: int, dtype: str) -> ProgramSample:
    import torch.nn.functional as F

    shape = (rows, 29, width)
    batch = example(shape, dtype), example(shape, dtype)
    model = attention_model(blocks, width, dtype)
    return _trained(f"attention {blocks} x {width}", model, F.mse_loss, AdamW(lr=1e-4), batch, strategy)


def _inference(layers: int, width: int, rows: int, dtype: str) -> ProgramSample:
    model = feed_forward_model(layers, width, dtype).eval()
    plan = compile(model, (example((rows, width), dtype),), strategy=Strategy(), name=f"inference {layers} x {width}")
    return _sample(plan, plan.bundle(("torch",)))
