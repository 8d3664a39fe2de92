"""Simulations that the tests of reports share."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.compiler.simulate import simulate
from distir_relax.ir import Function, Module
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.program_builder import ProgramBuilder
from distir_relax.simulation.simulation import Simulation
from tests import mlp

PROFILE = "dgx2-v100"


def training(strategy: str = "1/1/3/5", layers: int = 7, width: int = 127, batch: int = 35) -> Simulation:
    """A training step of a small MLP."""
    return simulate(mlp.program(layers, width, strategy, batch), profile=PROFILE)


def with_locations(module: Module, location: str) -> Module:
    """The module, all of whose ops come from one place in the user's model."""

    def moved(function: Function) -> Function:
        return replace(function, ops=tuple(replace(op, location=location) for op in function.ops))

    return replace(module, functions=tuple(map(moved, module.functions)))


def streams() -> Simulation:
    """Two devices that reduce on a stream while they compute, and wait for it."""
    program = ProgramBuilder(DeviceMesh((2,), ("dp",)))
    main = program.function("main")
    x = main.input("x", (2047, 2047), "float32", (0, 1))
    moved = main.emit("all_reduce", x, axis="dp", op="sum", stream="comm", hint="moved")
    y = main.emit("matmul", x, x, hint="y")
    main.output("z", main.emit("add", y, main.emit("wait", moved)))
    return simulate(program.build(), profile="dgx-a100")
