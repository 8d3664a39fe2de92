"""Python's time counts for each op of a program, unless its backend records it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.cost.profile import Line
from distir_relax.ir import Module
from distir_relax.ops import Trait, lookup
from distir_relax.simulation.recorded_programs import result_bytes
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

SLOW = replace(
    machine(3),
    kind="cpu", call=3e-3, python=1e-3, python_collective=1e-2, view=5e-3, recorded=1e9,
    lines=(Line("all_reduce", 3, 7e-2, 1e-10), Line("all_reduce", 3, 2e-2, 1e-10, recorded=True)),
)  # fmt: skip
FREE = replace(SLOW, call=0.0, python=0.0, python_collective=0.0, view=0.0)


def inference(strategy: str) -> Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(35, 127), nn.ReLU(), nn.Linear(127, 7)).eval()
    return fuse_for_ranks(dr.compile(model, (torch.randn(5, 35),), strategy=strategy).modules["distributed"])


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/1/1"])
def test_small_programs_are_bound(strategy: str) -> None:
    module = inference(strategy)
    least = simulate_module(module, FREE).makespan
    assert simulate_module(module, SLOW).makespan == least
    limited = replace(SLOW, recorded=result_bytes(module))
    assert simulate_module(module, limited).makespan == least
    too_small = replace(limited, recorded=limited.recorded - 1)
    slower = simulate_module(module, too_small).makespan
    ops = [lookup(op.name) for function in module.functions for op in function.ops]
    sums = sum(Trait.COMMUNICATES in op.traits for op in ops)
    # Products have no call time here: theirs are of their matrix.
    products, computing = (
        sum(not {Trait.COMMUNICATES, Trait.VIEW, Trait.SCALAR} & op.traits and bool(op.cost.product) == is_product
            for op in ops)
        for is_product in (True, False)
    )  # fmt: skip
    assert sums == (strategy != "1/1/1/1")
    expected = (products + computing) * 1e-3 + computing * 3e-3 + sums * (1e-2 + 7e-2 - 2e-2)
    assert slower - least == pytest.approx(expected, rel=1e-6)
    assert simulate_module(module, too_small, is_recorded=True).makespan == least
    assert simulate_module(module, SLOW, is_recorded=False).makespan == slower


def test_ops_without_a_native_kernel_take_the_time_of_python_in_any_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(35, 127), nn.Unflatten(1, (1, 127)), nn.Tanh(), nn.Hardtanh()).eval()
    module = fuse_for_ranks(dr.compile(model, (torch.randn(5, 35),), strategy="1/1/1/1").modules["distributed"])
    ops = [lookup(op.name) for op in module.main.ops]
    by_python = sum(not op.is_native and not op.cost.product and Trait.VIEW not in op.traits for op in ops)
    assert by_python
    assert any(Trait.VIEW in op.traits for op in ops), "views take no time"
    found, free = simulate_module(module, SLOW).makespan, simulate_module(module, FREE).makespan
    assert found - free == pytest.approx(by_python * (1e-3 + 3e-3), rel=1e-6)


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
        model, nn.functional.mse_loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, strategy="1/1/1/1"
    )
    module = fuse_for_ranks(step.plan.modules["distributed"])
    free = simulate_module(module, FREE).makespan
    assert simulate_module(module, SLOW).makespan > free + 10 * 1e-3
