"""Python's time counts for each op of a program, unless its backend binds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.analysis.bound_programs import result_bytes
from distir_relax.analysis.simulator import simulate_module
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.ir import Module
from distir_relax.ops import Trait, lookup
from tests.machines import machine

SLOW = replace(machine(3), kind="cpu", python=1e-3, python_collective=1e-2, bound=1e9)


def inference(strategy: str) -> Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(35, 127), nn.ReLU(), nn.Linear(127, 7)).eval()
    return fuse_for_ranks(dr.compile(model, (torch.randn(5, 35),), strategy=strategy).modules["distributed"])


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/1/1"])
def test_small_programs_are_bound(strategy: str) -> None:
    module = inference(strategy)
    free = replace(SLOW, python=0.0, python_collective=0.0)
    assert simulate_module(module, SLOW).makespan == simulate_module(module, free).makespan
    limited = replace(SLOW, bound=result_bytes(module))
    assert simulate_module(module, limited).makespan == simulate_module(module, free).makespan
    slower = simulate_module(module, replace(limited, bound=limited.bound - 1)).makespan
    ops = [lookup(op.name) for function in module.functions for op in function.ops]
    sums = sum(Trait.COMMUNICATES in op.traits for op in ops)
    computing = sum(not {Trait.COMMUNICATES, Trait.VIEW, Trait.SCALAR} & op.traits for op in ops)
    assert sums == (strategy != "1/1/1/1")
    expected = computing * 1e-3 + sums * 1e-2
    assert slower - simulate_module(module, free).makespan == pytest.approx(expected, rel=1e-6)


def test_results_of_all_calls_count() -> None:
    module = inference("1/1/1/1")
    assert result_bytes(module) == 4 * 5 * (127 + 127 + 7)
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(35, 35), nn.GELU(), nn.Linear(35, 35), nn.Tanh()) for _ in range(6)))
    program = dr.compile(deep.eval(), (torch.randn(5, 35),), strategy="1/1/1/1").modules["distributed"]
    assert len(program.functions) == 2, "a function is called six times"
    assert result_bytes(fuse_for_ranks(program)) == 6 * 4 * (4 * 5 * 35)


def test_training_steps_are_not() -> None:
    model = nn.Sequential(nn.Linear(35, 127), nn.ReLU(), nn.Linear(127, 7))
    batch = torch.randn(5, 35), torch.randn(5, 7)
    step = dr.compile_training(
        model, nn.functional.mse_loss, optimizer=dr.SGD(lr=0.1), example_batch=batch, strategy="1/1/1/1"
    )
    module = fuse_for_ranks(step.plan.modules["distributed"])
    free = simulate_module(module, replace(SLOW, python=0.0)).makespan
    assert simulate_module(module, SLOW).makespan > free + 10 * 1e-3
