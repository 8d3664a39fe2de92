"""One golden text per pass, on the RFC's example. ``UPDATE_GOLDEN=1 pytest tests/test_golden.py`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distir_relax.ir import DeviceMesh, Module, parse, print_module, verify
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.lowering.to_torch import to_torch
from distir_relax.ops import check
from distir_relax.sharding import DelayReductions, Propagate
from tests.rfc import rfc_module

GOLDEN = Path(__file__).parent / "golden"


def stages(tail: str) -> dict[str, Module]:
    """Each stage of the RFC's example on two ranks, in the order of the pipeline."""
    propagated = Propagate(DeviceMesh((2,), ("tp",))).run(rfc_module()).module
    delayed = DelayReductions().run(propagated)
    distributed = ToDistIR(tail).run(delayed)
    ranked = Project().run(distributed)
    return {
        "propagated": propagated,
        "delayed": delayed,
        f"distributed_{tail}": distributed,
        f"ranked_{tail}": ranked,
        f"fused_{tail}": FuseLocal().run(ranked),
    }


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_stages(tail: str) -> None:
    for name, module in stages(tail).items():
        verify(module, check)
        text = print_module(module)
        assert parse(text) == module
        compare(f"rfc_{name}.txt", text)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_torch_programs(tail: str) -> None:
    for program, text in to_torch(stages(tail)[f"fused_{tail}"], "rfc").items():
        compile(text, program, "exec")
        compare(f"rfc_{tail}_{program}.py.txt", text)
