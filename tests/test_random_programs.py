"""Whole programs, random ones: sharded, lowered and run on all devices, they give what the unsharded program gives."""

from __future__ import annotations

import warnings

import pytest
import torch

from distir_relax.analysis import execute, interpret
from distir_relax.ir import DeviceMesh, parse, print_module, verify
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.ops import check
from distir_relax.sharding import DelayReductions, Propagate
from tests.programs import Generator

MESHES = {
    "2": DeviceMesh((2,), ("tp",)),
    "3": DeviceMesh((3,), ("tp",)),
    "5": DeviceMesh((5,), ("tp",)),
    "2x3": DeviceMesh((2, 3), ("dp", "tp")),
    "3x1x2": DeviceMesh((3, 1, 2), ("dp", "pp", "tp")),
}


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("block", range(4))
def test_sharded_equals_unsharded(block: int, name: str, tail: str) -> None:
    for seed in range(block * 20, block * 20 + 20):
        check_program(seed, MESHES[name], tail)


def check_program(seed: int, mesh: DeviceMesh, tail: str) -> None:
    """Every stage verifies and round-trips, and the schedule computes what the model does."""
    program = Generator(seed, mesh).build()
    verify(program.module, check)
    expected = interpret(program.module.main, program.tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        propagated = Propagate().run(program.module).module
    sharded = DelayReductions().run(propagated)
    distributed = ToDistIR(tail).run(sharded)
    ranked = FuseLocal().run(Project().run(distributed))
    for module in (propagated, sharded, distributed, ranked):
        verify(module, check)
        assert parse(print_module(module)) == module
    found = execute(sharded, distributed, program.tensors)
    for key, value in expected.items():
        assert found[key].shape == value.shape
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=f"seed {seed}, output {key}")
