"""Ops in a program are slower than the same op again and again: their data lies further away, and a Python line stands
between two. Calibration runs whole programs too, of sizes of its own, and fits one factor and one overhead to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from distir_relax.analysis.profile import Matrix, Profile
from distir_relax.analysis.simulate import simulate_module
from distir_relax.calibration.fit import minimise
from distir_relax.ir import DeviceMesh, Module, inline
from distir_relax.lowering import FuseLocal
from distir_relax.lowering.to_bundle import program_bundle
from distir_relax.runtime.backends import load_program
from distir_relax.runtime.threads import ThreadWorld
from distir_relax.runtime.world import World
from distir_relax.transforms import ProgramBuilder, Strategy, mlp_training

_STEPS = 15


def programs(dtype: str, scale: int) -> list[tuple[Module, dict[str, int]]]:
    """Programs of one device, each with the widths of its weights by name. `scale` multiplies the widths."""
    found: list[tuple[Module, dict[str, int]]] = []
    for layers, width, batch, microbatches in ((3, 250, 10, 1), (3, 250, 42, 3), (5, 500, 10, 3), (5, 900, 42, 1)):
        strategy = Strategy(microbatches=microbatches)
        module = mlp_training(layers, width * scale, strategy, batch, dtype, rate=1e-4)
        found.append((module, {f"w{i}": width * scale for i in range(layers)}))
    for layers, width, rows in ((5, 350, 5), (5, 350, 42), (3, 1250, 5), (3, 1250, 42)):
        found.append((_inference(layers, width * scale, rows, dtype), {f"w{i}": width * scale for i in range(layers)}))
    return found


def time_programs(dtype: str, scale: int, device: str, world: World | None) -> list[float]:
    """The seconds of a step of each program, on this device; all ranks of a launch run it at the same time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = []
    for module, weights in programs(dtype, scale):
        tensors = {
            name: (torch.randn(width, width, generator=generator) / width**0.5).to(getattr(torch, dtype))
            for name, width in weights.items()
        }
        bundle = program_bundle("sample", module, tensors)
        comm = ThreadWorld(bundle.manifest.mesh).communicator(0, device)
        program = load_program("torch", bundle, 0, comm, device)
        inputs = [
            torch.randn(t.shape, generator=generator).to(getattr(torch, dtype)).to(device)
            for t in bundle.manifest.inputs
        ]
        if world is not None:
            world.exchange(0)
        seconds = []
        for _ in range(_STEPS):
            start = time.perf_counter()
            program(*inputs)
            if device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append(median(seconds[3:]))
    return found


def fit_programs(profile: Profile, dtype: str, scale: int, seconds: Sequence[float]) -> tuple[Profile, float]:
    """`profile` with its ops slower by a factor, and with more overhead, as programs are; and their median error."""
    modules = [FuseLocal().run(inline(module)) for module, _ in programs(dtype, scale)]

    def predicted(x: dict[str, float]) -> list[float]:
        slower = slowed(profile, x["factor"], x["overhead"])
        return [simulate_module(module, slower).makespan for module in modules]

    def loss(x: dict[str, float]) -> float:
        return sum((p / t - 1) ** 2 for p, t in zip(predicted(x), seconds, strict=True))

    found, _ = minimise(loss, {"factor": 1.1, "overhead": 1e-6}, step=0.3)
    errors = [abs(p / t - 1) for p, t in zip(predicted(found), seconds, strict=True)]
    return slowed(profile, found["factor"], found["overhead"]), median(errors)


def slowed(profile: Profile, factor: float, overhead: float) -> Profile:
    """A machine whose ops take `factor` times as long, and `overhead` seconds more."""

    def products(table: dict[str, Matrix]) -> dict[str, Matrix]:
        return {dtype: replace(m, flops=m.flops / factor) for dtype, m in table.items()}

    return replace(
        profile,
        overhead=profile.overhead * factor + overhead,
        bandwidth=profile.bandwidth / factor,
        cache_bandwidth=profile.cache_bandwidth / factor,
        matrix=products(dict(profile.matrix)),
        packed=products(dict(profile.packed)),
        vector={dtype: rate / factor for dtype, rate in profile.vector.items()},
        ops={dtype: {name: rate / factor for name, rate in table.items()} for dtype, table in profile.ops.items()},
    )


def _inference(layers: int, width: int, rows: int, dtype: str) -> Module:
    program = ProgramBuilder(DeviceMesh((1,), ("device",)))
    main = program.function("main")
    x = main.tensor("x", (rows, width), dtype, "R")
    for i in range(layers):
        w = main.tensor(f"w{i}", (width, width), dtype, "R", "parameter")
        x = main.emit("nn.relu", main.emit("linear", x, w))
    main.output("y", x, (rows, width), "R")
    return program.build()
