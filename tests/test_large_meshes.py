"""What the compiler does for a mesh does not grow with the number of its devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from distir_relax.compiler.pass_manager import run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch import import_torch
from distir_relax.ir import Module, print_module
from distir_relax.layout import DeviceMesh
from tests.zoo import gpt2

_SHARDINGS = {
    "transformer.h.*.attn.c_attn.weight": "S[1]",
    "transformer.h.*.mlp.c_fc.weight": "S[1]",
    "transformer.wte.weight": "S[0]",
}


@pytest.fixture(scope="module")
def imported() -> Imported:
    """A GPT-2 of 12 heads, on a batch of 2."""
    case = gpt2(layers=2, width=60, heads=12)
    return import_torch(case.model, case.args, case.kwargs)


def _compile(imported: Imported, mesh: DeviceMesh, tail: str) -> Module:
    """Heads, inner dims and the vocabulary along the last axis, the batch along the first where there are two."""
    replicas = "R, " * (len(mesh.shape) - 1)
    shardings = {name: replicas + text for name, text in _SHARDINGS.items()}
    if len(mesh.shape) > 1:
        shardings["input_ids"] = "S[0], R"
    return run_passes(imported.module, compile_passes(mesh, tail, shardings, imported.names))


def _calls(step: Callable[[], Any]) -> int:
    """How many functions `step` calls, and generators it resumes: a measure of work that no other load disturbs."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("shape", [(32, 32), (128, 8)])
def test_a_thousand_devices_are_no_more_work_than_two(imported: Imported, shape: tuple[int, ...], tail: str) -> None:
    small, large = DeviceMesh((2,), ("tp",)), DeviceMesh(shape, ("dp", "tp"))
    _compile(imported, small, tail)  # What is read in once is not counted.
    few, many = (_calls(lambda mesh=mesh: _compile(imported, mesh, tail)) for mesh in (small, large))
    # A loop over the devices in every op would make it a hundred times as many.
    assert many < 3 * few


def test_ranks_that_differ_have_programs_of_their_own(imported: Imported) -> None:
    """On 5 x 3 devices 12 heads are 4, 4, 4 and a batch of 2 is 1, 1, 0, 0, 0; the vocabulary of 97 is 33, 32, 32."""
    module = _compile(imported, DeviceMesh((5, 3), ("dp", "tp")), "ragged")
    first, *others = module.ranks
    assert first == "main_0"
    assert len(module.functions) == len(set(module.ranks)) == 4
    assert others[:5] == ["main_1", "main_1", "main_0", "main_1", "main_1"]
    assert others[5:] == ["main_2", "main_3", "main_3"] * 3
    assert "f32[1,13,33]" in print_module(module)
