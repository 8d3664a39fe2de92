"""Sums of what calls give are made in the functions called: the same numbers, fewer ops, no more memory."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.interpret.distributed_executor import execute
from distir_relax.ir import Module, verify
from distir_relax.lowering import AccumulateInCalls, Pipeline
from distir_relax.lowering.gradient_accumulation import accumulate_in_calls
from distir_relax.ops import check
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

ROWS = 13


class Residual(nn.Module):
    """Layers whose results are added to what they take, one weight of which is used in each, and a scale of all."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x * self.scale)
        return x.square().sum(1).mean()


@cache
def before(strategy: str) -> tuple[Module, Module, dict[str, torch.Tensor]]:
    """A step at the sharded and the distributed stage, for one place, nothing moved yet; and what it takes."""
    torch.manual_seed(0)
    plan = dr.compile_training(
        Residual(), optimizer=dr.optim.SGD(lr=0.1, momentum=0.5), example_batch=(x := torch.randn(ROWS, 7)),
        strategy=strategy, passes=lambda ps: [p for p in ps if not isinstance(p, (AccumulateInCalls, Pipeline))],
    ).plan  # fmt: skip
    taken = dict(plan.imported.tensors)
    for item in plan.modules["sharded"].main.inputs:
        if (name := item.value.name) not in taken:
            _, _, number = name.rpartition(".")
            rate = torch.tensor(0.1, dtype=torch.float64)
            taken[name] = x.tensor_split(int(strategy[-1]))[int(number)] if number.isdigit() else rate
    return plan.modules["sharded"], plan.modules["distributed"], taken


STRATEGIES = ["1/1/1/4", "1/1/2/3", "1/1/3/5", "2/1/2/3", "1/3/2/2", "3/1/3/4"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_the_same_bit_for_bit(strategy: str) -> None:
    sharded, module, taken = before(strategy)
    moved = accumulate_in_calls(module)
    verify(moved, check)
    expected, found = execute(sharded, module, taken), execute(sharded, moved, taken)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert all(value.any() for value in expected.values())


@pytest.mark.parametrize("strategy", ["1/1/2/3", "1/1/3/5", "2/1/2/3"])
def test_no_sum_of_parts_is_left_to_the_entry(strategy: str) -> None:
    _, module, _ = before(strategy)
    moved = accumulate_in_calls(module)
    made = {v.name: op for op in moved.main.ops for v in op.results}
    for op in moved.main.ops:
        if op.name == "add" and all(v.name in made and made[v.name].task for v in op.operands):
            # The weight of several stages: its gradients come from unlike places of their calls.
            stages = {made[v.name].task["stage"] for v in op.operands}
            assert len(stages) > 1, op
    weights = 4 * 3
    microbatches = int(strategy[-1])
    assert len(moved.main.ops) <= len(module.main.ops) - weights * (microbatches - 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_is_the_same_and_memory_no_more_than_by_one_sum(strategy: str) -> None:
    _, module, _ = before(strategy)
    profile = machine(8)
    expected, found = (simulate_module(m, profile) for m in (module, accumulate_in_calls(module)))
    assert found.device_ops == expected.device_ops
    # What a call works on is there still when it adds.
    largest = 5 * 7 * 4
    assert (found.peak_memory <= expected.peak_memory + largest).all()


def test_a_weight_of_several_stages_makes_none_wait_for_another() -> None:
    """The gradients of the scale, one from each stage, are added up outside."""
    _, module, _ = before("1/1/3/5")
    moved = accumulate_in_calls(module)
    weights = [op for op in moved.main.ops if op.task and op.task["kind"] == "W"]
    stage_of = {v.name: op.task["stage"] for op in weights for v in op.results}
    for op in weights:
        assert {stage_of.get(v.name, op.task["stage"]) for v in op.operands} == {op.task["stage"]}
    assert accumulate_in_calls(moved) == moved
