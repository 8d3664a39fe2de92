"""Ops in a program are slower than the same op again and again: their data lies further away, and a Python line stands
between two. Communications are too: ranks come to them at unlike times, with tensors that were just made.

Calibration runs whole programs as well, of sizes of its own, on one device and over all, and fits a factor and an
overhead to each of the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from distir_relax.analysis.simulate import simulate_module
from distir_relax.bundle import Bundle
from distir_relax.calibration.fit import minimise
from distir_relax.calibration.measure import WARM_UP, time_steps
from distir_relax.compiler import program_bundle
from distir_relax.cost.profile import Level, Line, Matrix, Profile
from distir_relax.ir import Module
from distir_relax.layout import DeviceMesh
from distir_relax.pipeline import as_ranks_run
from distir_relax.runtime.backends import load_program
from distir_relax.runtime.transports.threads import ThreadWorld
from distir_relax.runtime.world import World
from distir_relax.strategies import ProgramBuilder, Strategy, mlp_training

_STEPS = 6
# Of the fit, each of which simulates all programs twice for every parameter: more change nothing that counts.
_ROUNDS = 80


@dataclass(frozen=True)
class ProgramSample:
    """A program, and the width of its square weights by name."""

    module: Module
    weights: dict[str, int]
    dtype: str

    @property
    def devices(self) -> int:
        """How many devices it is for."""
        return self.module.meshes[0].size


def programs(dtype: str, scale: int, ranks: int) -> list[ProgramSample]:
    """Programs of one device and, where there are several, of all `ranks`. `scale` multiplies the widths."""
    found = []
    for layers, width, batch, microbatches in ((3, 250, 10, 1), (3, 250, 42, 3), (5, 500, 10, 3), (5, 900, 42, 1)):
        found.append(_training(layers, width * scale, Strategy(microbatches=microbatches), batch, dtype))
    for layers, width, rows in ((5, 350, 5), (5, 350, 42), (3, 1250, 5), (3, 1250, 42)):
        found.append(_inference(layers, width * scale, rows, dtype))
    if ranks > 1:
        for layers, width, rows, microbatches in ((3, 250, 10, 1), (3, 250, 42, 3), (3, 500, 10, 3), (5, 900, 42, 1)):
            shared = Strategy(microbatches=microbatches)
            batch = rows * ranks
            found.append(_training(layers, width * scale, replace(shared, data=ranks), batch, dtype))
            found.append(_training(layers, width * scale, replace(shared, tensor=ranks), batch, dtype))
            found.append(_training(layers * ranks, width * scale, replace(shared, pipeline=ranks), batch, dtype))
    return found


def time_programs(dtype: str, scale: int, device: str, world: World | None) -> list[list[float]]:
    """The seconds of steps of each program; all ranks of a launch run those of one device at the same time."""
    found = []
    for sample in programs(dtype, scale, world.size if world else 1):
        bundle = _bundle(sample)
        if sample.devices == 1:
            found.append(_time_alone(bundle, sample, device, world))
        else:
            assert world is not None
            found.append(time_steps(world, bundle, _STEPS, device))
    return found


def fit_programs(
    profile: Profile, dtype: str, scale: int, ranks: int, seconds: Sequence[float]
) -> tuple[Profile, dict[str, float]]:
    """`profile` with ops and communications as slow as they are in programs, and the median errors of programs of one
    device and of several. What fits a cache lies in a nearer one when an op runs again and again, so the bandwidth of
    the cache is that of programs."""
    samples = programs(dtype, scale, ranks)
    modules = [as_ranks_run(sample.module) for sample in samples]

    def machine(x: Mapping[str, float]) -> Profile:
        found = slowed(profile, x["factor"], x["overhead"])
        if profile.cache:
            found = replace(found, cache_bandwidth=x["cache_bandwidth"])
        return delayed(found, x["communication factor"], x["communication overhead"]) if ranks > 1 else found

    def errors(x: Mapping[str, float]) -> list[float]:
        found = machine(x)
        return [simulate_module(m, found).makespan / taken for m, taken in zip(modules, seconds, strict=True)]

    start = {"factor": 1.1, "overhead": 1e-6}
    if profile.cache:
        start["cache_bandwidth"] = 3 * profile.bandwidth
    if ranks > 1:
        start.update({"communication factor": 1.1, "communication overhead": 1e-6})
    x, _ = minimise(lambda x: sum(math.log(ratio) ** 2 for ratio in errors(x)), start, 0.3, _ROUNDS)
    off: dict[str, list[float]] = {}
    for sample, ratio in zip(samples, errors(x), strict=True):
        group = "programs" if sample.devices == 1 else "programs of all ranks"
        off.setdefault(group, []).append(abs(ratio - 1))
    return machine(x), {group: median(found) for group, found in off.items()}


def slowed(profile: Profile, factor: float, overhead: float) -> Profile:
    """A machine whose ops take `factor` times as long, and `overhead` seconds more."""

    def products(table: dict[str, Matrix]) -> dict[str, Matrix]:
        return {dtype: replace(m, flops=m.flops / factor) for dtype, m in table.items()}

    return replace(
        profile,
        overhead=profile.overhead * factor + overhead,
        bandwidth=profile.bandwidth / factor,
        matrix=products(dict(profile.matrix)),
        packed=products(dict(profile.packed)),
        vector={dtype: rate / factor for dtype, rate in profile.vector.items()},
        ops={dtype: {name: rate / factor for name, rate in table.items()} for dtype, table in profile.ops.items()},
    )


def delayed(profile: Profile, factor: float, overhead: float) -> Profile:
    """A machine whose communications take `factor` times as long, and `overhead` seconds more."""

    def level(row: Level) -> Level:
        return replace(row, latency=row.latency * factor + overhead, bandwidth=row.bandwidth / factor)

    def line(row: Line) -> Line:
        return replace(
            row,
            latency=row.latency * factor + overhead,
            seconds_per_byte=row.seconds_per_byte * factor,
            points=tuple((size, seconds * factor + overhead) for size, seconds in row.points),
        )

    return replace(profile, levels=tuple(map(level, profile.levels)), lines=tuple(map(line, profile.lines)))


def _bundle(sample: ProgramSample) -> Bundle:
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, sample.dtype)
    tensors = {
        name: (torch.randn(width, width, generator=generator) / width**0.5).to(dtype)
        for name, width in sample.weights.items()
    }
    return program_bundle("sample", sample.module, tensors)


def _time_alone(bundle: Bundle, sample: ProgramSample, device: str, world: World | None) -> list[float]:
    import torch

    comm = ThreadWorld(bundle.manifest.mesh).communicator(0, device)
    program = load_program("torch", bundle, 0, comm, device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(t.shape, generator=generator).to(getattr(torch, sample.dtype)).to(device)
        for t in bundle.manifest.inputs
    ]
    if world is not None:
        world.exchange(0)
    seconds = []
    for _ in range(WARM_UP + _STEPS):
        start = time.perf_counter()
        program(*inputs)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def _training(layers: int, width: int, strategy: Strategy, batch: int, dtype: str) -> ProgramSample:
    module = mlp_training(layers, width, strategy, batch, dtype, rate=1e-4)
    return ProgramSample(module, {f"w{i}": width for i in range(layers)}, dtype)


def _inference(layers: int, width: int, rows: int, dtype: str) -> ProgramSample:
    program = ProgramBuilder(DeviceMesh((1,), ("device",)))
    main = program.function("main")
    x = main.tensor("x", (rows, width), dtype, "R")
    for i in range(layers):
        w = main.tensor(f"w{i}", (width, width), dtype, "R", "parameter")
        x = main.emit("nn.relu", main.emit("linear", x, w))
    main.output("y", x, (rows, width), "R")
    return ProgramSample(program.build(), {f"w{i}": width for i in range(layers)}, dtype)
