"""Whole programs, random ones: sharded, lowered and run on all devices, they give what the unsharded program gives."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, assume, find, given, settings
from hypothesis import strategies as st

from distir_relax.errors import PlacementError
from distir_relax.ir import Module
from distir_relax.layout import DeviceMesh
from distir_relax.proof import check_projection, check_schedule
from distir_relax.sharding import Propagate
from tests.backends import check_backend
from tests.compiled import check_results, compiled
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", MESHES)
def test_sharded_equals_unsharded(name: str, tail: str) -> None:
    @settings(SETTINGS, max_examples=20, derandomize=True)
    @given(programs(MESHES[name]))
    def run(program: Program) -> None:
        check_program(program, tail)

    run()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("backend", "count"), [("torch", 8), ("tvm", 1)])
def test_ranks_give_what_the_unsharded_program_gives(backend: str, count: int, name: str, tail: str) -> None:
    pytest.importorskip("tvm" if backend == "tvm" else "torch")

    @settings(SETTINGS, max_examples=count, derandomize=True)
    @given(programs(MESHES[name]))
    def run(program: Program) -> None:
        check_program(program, tail, backend)

    run()


def test_a_program_that_is_found_shrinks() -> None:
    """Of the programs with a pending sum, one with hardly more than the op that leaves it; all of 9 steps at first."""

    def is_pending(program: Program) -> bool:
        return any("I[sum]" in str(v.type) for op in propagate(program).main.ops for v in op.results)

    least = find(programs(MESHES["3"]), is_pending, settings=settings(SETTINGS, max_examples=100, derandomize=True))
    assert len(least.module.main.ops) <= 4


def check_program(program: Program, tail: str, by: str = "reference") -> None:
    """Every stage verifies and round-trips, the ranks have the schedule, is proved, and computes what the model does.

    It is executed `by` the reference executor, or by the ranks of a backend.
    """
    with drawn_anew():
        stages = compiled(program.module, tail)
    check_schedule(stages["sharded"], stages["distributed"])
    check_projection(stages["distributed"], stages["ranked"])
    if by == "reference":
        check_results(stages, program.tensors)
    else:
        check_backend(stages, program.tensors, tail, by)


def propagate(program: Program) -> Module:
    """The sharded module."""
    with drawn_anew():
        return Propagate().run(program.module)


@contextmanager
def drawn_anew() -> Iterator[None]:
    """A program whose annotation gives sizes that tear a unit apart is none: another is drawn."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PlacementError as error:
        if "split units" not in error.message:
            raise
        assume(False)
