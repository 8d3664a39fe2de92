"""Whole programs, random ones: sharded, lowered and run on all devices, they give what the unsharded program gives."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, find, given, settings
from hypothesis import strategies as st

from distir_relax.analysis import execute, interpret
from distir_relax.errors import PlacementError
from distir_relax.ir import DeviceMesh, Module, parse, print_module, verify
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.ops import check
from distir_relax.sharding import DelayReductions, Propagate
from tests.programs import Generator, Program

MESHES = {
    "2": DeviceMesh((2,), ("tp",)),
    "3": DeviceMesh((3,), ("tp",)),
    "5": DeviceMesh((5,), ("tp",)),
    "2x3": DeviceMesh((2, 3), ("dp", "tp")),
    "3x1x2": DeviceMesh((3, 1, 2), ("dp", "pp", "tp")),
}
TAILS = ("ragged", "pad")

SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Drawn(random.Random):
    """A source of random numbers read from `data`, 53 bits each, and of zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = iter(data)

    def random(self) -> float:
        return (int.from_bytes([next(self.data, 0) for _ in range(7)]) >> 3) / (1 << 53)


@st.composite
def programs(draw: st.DrawFn, mesh: DeviceMesh) -> Program:
    """A program for `mesh`; Hypothesis draws every choice, so that one that fails shrinks.

    All choices but the number of ops are one string of bytes: drawn one by one, Hypothesis would repeat them, and most
    programs would be the same few ops over and over.
    """
    ops = draw(st.sampled_from((*range(1, 10), *[9] * 20)))
    return Generator(Drawn(draw(st.binary(min_size=150 * ops, max_size=150 * ops))), mesh, ops).build()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", MESHES)
def test_sharded_equals_unsharded(name: str, tail: str) -> None:
    @settings(SETTINGS, max_examples=60, derandomize=True)
    @given(programs(MESHES[name]))
    def run(program: Program) -> None:
        check_program(program, tail)

    run()


def test_a_program_that_is_found_shrinks() -> None:
    """Of the programs with a pending sum, one with hardly more than the op that leaves it; all of 9 steps at first."""

    def is_pending(program: Program) -> bool:
        return any("I[sum]" in str(v.type) for op in propagate(program).main.ops for v in op.results)

    least = find(programs(MESHES["3"]), is_pending, settings=settings(SETTINGS, max_examples=100, derandomize=True))
    assert len(least.module.main.ops) <= 4


def check_program(program: Program, tail: str) -> None:
    """Every stage verifies and round-trips, and the schedule computes what the model does."""
    verify(program.module, check)
    expected = interpret(program.module.main, program.tensors)
    propagated = propagate(program)
    sharded = DelayReductions().run(propagated)
    distributed = ToDistIR(tail).run(sharded)
    ranked = FuseLocal().run(Project().run(distributed))
    for module in (propagated, sharded, distributed, ranked):
        verify(module, check)
        assert parse(print_module(module)) == module
    found = execute(sharded, distributed, program.tensors)
    for key, value in expected.items():
        assert found[key].shape == value.shape
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)


def propagate(program: Program) -> Module:
    """The sharded module. A program whose annotation gives sizes that tear a unit apart is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Propagate().run(program.module).module
    except PlacementError as error:
        if "tear apart" not in error.message:
            raise
        assume(False)
        raise
