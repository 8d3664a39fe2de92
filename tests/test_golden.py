"""One golden text per pass, on the RFC's example and on blocks that are a function.

``UPDATE_GOLDEN=1 pytest tests/test_golden.py`` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import distir_relax as dr
from distir_relax.compiler.pass_manager import Observer, Verify, run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.executable import BatchRequests, Hoist, PlanMemory, SelectKernels
from distir_relax.executable.check_memory import check_memory
from distir_relax.ir import Module, Pass, parse, print_module, program_of, verify
from distir_relax.layout import DeviceMesh, assuming
from distir_relax.lowering import (
    AttendStates,
    BoundAttention,
    IndexPositions,
    OneSequence,
    SkipRepeats,
)
from distir_relax.lowering.emit.torch import to_executable, to_torch
from distir_relax.ops import check
from tests.blocks import blocks_module
from tests.decoder import Decoder
from tests.rfc import rfc_module

GOLDEN = Path(__file__).parent / "golden"


def stages(tail: str, module: Module) -> dict[str, Module]:
    """An example on two ranks after each pass, by the name of its golden text."""
    names = ("propagated", "delayed", f"distributed_{tail}", f"ranked_{tail}", f"fused_{tail}")
    kept = Kept()
    run_passes(module, compile_passes(DeviceMesh((2,), ("tp",)), tail), [kept, Verify()])
    # No products of these have the same input: joining them changes nothing.
    *modules, joined = kept.modules
    assert joined == modules[-1]
    return dict(zip(names, modules, strict=True))


class Kept(Observer):
    """The program after each pass."""

    def __init__(self) -> None:
        self.modules: list[Module] = []

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        if step is not None:
            self.modules.append(module)


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


EXAMPLES = {"rfc": rfc_module, "blocks": blocks_module}


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_pipeline_stages(example: str, tail: str) -> None:
    for name, module in stages(tail, EXAMPLES[example]()).items():
        text = print_module(module)
        assert parse(text) == module
        compare(f"{example}_{name}.txt", text)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_torch_programs(example: str, tail: str) -> None:
    for program, text in to_torch(stages(tail, EXAMPLES[example]())[f"fused_{tail}"], example).items():
        compile(text, program, "exec")
        compare(f"{example}_{tail}_{program}.py.txt", text)


def test_blocks_become_a_function() -> None:
    compare("blocks_outlined.txt", print_module(blocks_module()))


def test_a_decode_step() -> None:
    """Of the second of two ranks, for several requests."""
    torch.manual_seed(0)
    plan = dr.compile_generation(Decoder(), max_length=64, strategy="1/2/1/1").plan
    ranked, states = plan.modules["ranked"], plan.bundle().manifest.states
    with assuming(ranked.guards):
        module = program_of(OneSequence().run(ranked), ranked.ranks[1])
        following = {state.tensor.name: state.output for state in states}
        growing = {state.tensor.name: state.dim for state in states if state.grows}
        planned = PlanMemory(requests=True, states=following, growing=growing)
        of_requests = (BatchRequests(following), planned, SelectKernels())
        for step in (SkipRepeats(), IndexPositions(), BoundAttention(), AttendStates(following), Hoist(), *of_requests):
            module = step.run(module)
        verify(module, check)
        check_memory(module)
    assert parse(print_module(module)) == module
    compare("decode_executable.txt", print_module(module))


def test_a_training_step() -> None:
    """Of the first of two ranks, with the optimizer's state in parts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 127), torch.nn.GELU(), torch.nn.Linear(127, 12))
    x = torch.randn(6, 12)
    step = dr.compile_training(
        model, torch.nn.functional.mse_loss, optimizer=dr.optim.AdamW(), example_batch=(x, x), strategy="2/1/1/1,zero=1"
    )
    ranked = step.plan.modules["ranked"]
    with assuming(ranked.guards):
        module = to_executable(program_of(ranked, ranked.ranks[0]))
    assert parse(print_module(module)) == module
    compare("training_executable.txt", print_module(module))
