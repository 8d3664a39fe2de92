"""What simulations share: with it they find what each finds by itself, to the last event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Level, Profile, load_profile
from distir_relax.ir import RepeatedMicrobatches
from distir_relax.simulation import simulator
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulation_plan import SimulationPlan
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.batch_interpolation import differ_by_rank, interpolate, same_structure
from distir_relax.strategy_search.evaluate import Evaluator
from distir_relax.strategy_search.search_space import Candidate
from tests.simulation.test_microbatch_expansion import run, trained

DGX = load_profile("dgx2-v100")


def on_nodes(size: int, speeds: tuple[float, ...] = ()) -> Profile:
    """Nodes of so many devices, whose links are ten times as fast as those between them."""
    inner, outer = DGX.levels[0], DGX.levels[-1]
    levels = (
        Level("node", size, inner.latency, inner.bandwidth),
        Level("all", 60, outer.latency, inner.bandwidth / 10),
    )
    return replace(DGX, levels=levels, groups=tuple(Group(((i, i),), speed) for i, speed in enumerate(speeds)))


def all_of(simulation: Simulation) -> dict[str, Any]:
    """All that a simulation finds, class by class, event by event."""
    return {
        "clocks": simulation.clocks,
        "busy": (simulation.busy, simulation.streamed, simulation.device_ops),
        "peaks": [(peak.bytes, peak.split, [op.results for op in peak.ops]) for peak in simulation.peaks],
        "memory": simulation.memory_curves(),
        "events": [
            (event.op.name, event.op.results, event.classes, start, event.duration, event.kind, event.stream)
            for event, start in simulation.events()
        ],
    }


STRATEGIES = [
    ("1/1/5/4", 1),
    ("1/3/5/3", 2),
    ("3/1/5/3", 3),
    ("1/3/3/4,schedule=zb-h1,sequence_parallel", 2),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("strategy", "node"), STRATEGIES)
def test_a_call_does_on_other_devices_what_it_would_do_if_simulated_there(
    strategy: str, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of three devices on nodes of two lie in their nodes in two ways; some stages are equal."""
    machine = on_nodes(node)
    module = trained(24, strategy, machine, blocks=7).distributed(repeated=True)
    calls = simulated_calls(monkeypatch)
    together = all_of(simulate_module(module, machine))
    shared = len(calls)
    monkeypatch.setattr(SimulationPlan, "topology_key", lambda self, devices, present: devices)
    calls.clear()
    assert all_of(simulate_module(module, machine)) == together
    assert 0 < shared < len(calls)


def simulated_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls are simulated from now on, one by one."""
    calls: list[str] = []
    original = simulator._Simulator._simulate

    def noted(self: Any, call: Any) -> Any:
        calls.append(call.callee.name)
        return original(self, call)

    monkeypatch.setattr(simulator._Simulator, "_simulate", noted)
    return calls


def test_devices_of_other_speeds_do_not_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on_nodes(2, (1.0, 0.5, 0.5, 1.0, 0.7))
    module = trained(21, "1/1/5/7", DGX, blocks=5).distributed(repeated=True)
    found = simulate_module(module, machine)
    together = all_of(found)
    monkeypatch.setattr(SimulationPlan, "topology_key", lambda self, devices, present: devices)
    assert all_of(simulate_module(module, machine)) == together
    assert len(set(found.busy[0])) > 2


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/3/3/5", "3/1/2/5,zero=1"])
def test_one_structure_does_for_all_sizes(strategy: str) -> None:
    """Of a step of training on 30 to 150 samples, the one between by `scaled`, with the structure of the largest."""
    low, high = ((n, trained(n, strategy, DGX).distributed(repeated=True)) for n in (30, 150))
    structure = SimulationPlan(high[1], DGX)
    assert not differ_by_rank(low[1], high[1])
    for batch in (150, 75, 30):
        module = interpolate(low, high, batch)
        assert any(isinstance(record, RepeatedMicrobatches) for record in module.records)
        assert all_of(simulate_module(module, DGX, structure)) == all_of(simulate_module(module, DGX))


def test_so_it_does_for_a_model_that_runs() -> None:
    low, high = ((n, run(n, "1/3/3/7", DGX).distributed(repeated=True)) for n in (21, 210))
    structure = SimulationPlan(low[1], DGX)
    times = []
    for batch in (21, 63, 210):
        found = simulate_module(interpolate(low, high, batch), DGX, structure)
        assert all_of(found) == all_of(simulate_module(interpolate(low, high, batch), DGX))
        times.append(found.makespan)
    assert times == sorted(set(times))


@pytest.mark.sweep
def test_sizes_that_differ_from_device_to_device_are_told() -> None:
    """Of 20 samples 3 devices have 7, 7 and 6, of 41 they have 14, 14 and 13; of 21 and 42 all have as many."""
    uneven, larger, even = (run(rows, "3/1/1/1", DGX).distributed() for rows in (20, 41, 21))
    assert differ_by_rank(uneven, larger)
    assert differ_by_rank(uneven, even)
    assert not differ_by_rank(even, run(42, "3/1/1/1", DGX).distributed())
    assert not differ_by_rank(uneven, uneven)


@pytest.mark.sweep
def test_programs_that_differ_in_more_than_sizes_are_told() -> None:
    few, many = (trained(24, "1/1/1/4", DGX, blocks=n).distributed(repeated=True) for n in (2, 3))
    assert not same_structure(few, many)
    assert same_structure(few, few)
    assert same_structure(few, trained(60, "1/1/1/4", DGX, blocks=2).distributed(repeated=True))


def test_a_search_shares_nothing_between_sizes_whose_programs_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest microbatches the program has fewer blocks, as if the compiler had done otherwise there."""
    few, many = (trained(60, "1/1/1/4", DGX, blocks=n) for n in (2, 3))
    small, large = (Candidate(Strategy(1, 1, 1, 4), n) for n in (24, 60))
    expected = [Evaluator(few, DGX).outcome(small), Evaluator(many, DGX).outcome(large)]
    original, other = Evaluator._compile, Evaluator(few, DGX)
    monkeypatch.setattr(Evaluator, "_compile", lambda self, c: original(other if c == small else self, c))
    evaluator = Evaluator(many, DGX, [small, large])
    assert [evaluator.outcome(small), evaluator.outcome(large)] == expected
