"""Periods of a pipeline that are folded: the simulation equals the one that runs all of them, to the last event."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training
from distir_relax.cost.profile import Level, load_profile
from distir_relax.interpret.interpreter import allocate_slots
from distir_relax.simulation.critical_path import critical_path
from distir_relax.simulation.events import Called
from distir_relax.simulation.microbatch_expansion import expand_entry
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulation_plan import SimulationPlan
from distir_relax.simulation.simulator import simulate_module
from distir_relax.simulation.steady_state import Fold
from tests.simulation.test_microbatch_expansion import assert_same, found, run, under
from tests.simulation.test_simulation_plan import all_of, on_nodes

DGX = load_profile("dgx2-v100")
INNER, OUTER = DGX.levels[0], DGX.levels[-1]
SHARED = (
    Level("node", 2, INNER.latency, INNER.bandwidth, uplink=INNER.bandwidth / 7),
    Level("all", 60, OUTER.latency, INNER.bandwidth / 10),
)
MACHINES = {
    "hosts that devices wait for": DGX,
    "hosts that nothing waits for": replace(DGX, dispatch=1e-9, view=0.0, shape_op=0.0),
    "no hosts": replace(DGX, dispatch=0.0),
    "uplinks": replace(DGX, dispatch=0.0, levels=SHARED),
    "nodes of other speeds": replace(on_nodes(2, (1.0, 0.5, 0.5, 1.0, 0.7)), dispatch=0.0),
}


def folded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many periods are repeated from now on, at each fold."""
    periods: list[int] = []
    original = Fold._repeat

    def noted(self: Fold, before: Any, state: Any, moves: Any, count: int) -> None:
        periods.append(count)
        original(self, before, state, moves, count)

    monkeypatch.setattr(Fold, "_repeat", noted)
    return periods


def everything(simulation: Simulation) -> dict[str, Any]:
    """All that a simulation finds, with its critical path, and its calls one by one."""
    path = critical_path(simulation)
    return {
        **all_of(simulation),
        "hosted": list(simulation.hosted),
        "path": [(s.op and s.op.results, s.device_class, s.start, s.duration, s.kind) for s in path.steps],
        "calls": [(c.op.task_name, c.op.results, c.base) for c in simulation.called()],
        "changes": [(c.op.task_name, c.base) if isinstance(c, Called) else tuple(c) for c in simulation._changes],
        "summary": str(simulation),
    }


WIDTH = 12


class Tied(nn.Module):
    """Layers, of which the last has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).relu()
        return x


@cache
def read(rows: int) -> Source:
    """A step of training, read in once for all strategies."""
    with torch.device("meta"):
        batch = torch.empty(rows, WIDTH), torch.empty(rows, WIDTH)
        return Training(Tied(), nn.MSELoss(), dr.optim.AdamW(), batch).read()


PIPELINES = ["1/1/3/31,schedule=1f1b", "1/1/2/29,schedule=zb-v,chunks=2"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strategy", PIPELINES)
def test_periods_that_are_folded_are_as_if_they_were_run(
    strategy: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of microbatches of two sizes, whose stages share weights."""
    profile = MACHINES[machine]
    module = under(strategy, DGX, read(67)).distributed(repeated=True)
    periods = folded(monkeypatch)
    short = everything(simulate_module(module, profile))
    assert sum(periods) > 10
    plan = SimulationPlan(module, profile)
    plan.cycle = None
    periods.clear()
    assert everything(simulate_module(module, profile, plan)) == short
    assert not periods


def test_so_they_are_for_other_sizes_and_against_all_microbatches_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second simulation has the plan of the first, and so the same cycle."""
    small, large = (under("1/1/3/25,schedule=zb-h1", DGX, read(rows)).distributed(repeated=True) for rows in (25, 50))
    plan, periods = SimulationPlan(small, DGX), folded(monkeypatch)
    assert everything(simulate_module(large, DGX, plan)) == everything(simulate_module(large, DGX))
    assert len(periods) == 2
    source = under("1/1/3/25,schedule=1f1b", DGX, read(50))
    few, every = (found(simulate_module(source.distributed(repeated=r), DGX)) for r in (True, False))
    assert few | {"summary": ""} == every | {"summary": ""}
    assert len(periods) == 3


def test_periods_with_more_live_memory_each_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPipe, all forwards precede the backwards; a model that runs keeps its outputs."""
    periods = folded(monkeypatch)
    assert_same(under("1/1/3/25,schedule=gpipe", DGX, read(50)), DGX)
    assert_same(run(36, "1/1/3/18", DGX), DGX)
    assert not periods


@pytest.mark.parametrize("strategy", [*PIPELINES, "1/1/3/25,schedule=gpipe", "1/1/1/23"])
def test_values_are_dead_after_the_last_step_that_has_them(strategy: str) -> None:
    """Against a search through all operands of all steps, those that a pattern of steps shares included."""
    steps = expand_entry(under(strategy, DGX, read(67)).distributed(repeated=True)).steps
    used = [list(dict.fromkeys((*r, *o))) for r, o in zip(steps.results, steps.operands, strict=True)]
    last = {value: number for number, values in enumerate(used) for value in values} | dict.fromkeys(steps.outputs, -1)
    program = allocate_slots(steps)
    assert [step.dead for step in program.steps] == [[v for v in row if last[v] == n] for n, row in enumerate(used)]
    assert program.unused == [value for value in range(steps.inputs) if value not in last]
