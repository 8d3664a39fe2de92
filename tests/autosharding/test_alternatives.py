"""What else there was for a value: as brute force finds it, the same from a bundle, and why there is none."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.alternatives import Alternatives
from distir_relax.autosharding.integer_program import solution_seconds
from distir_relax.autosharding.optimize import compute_costs, cost_table_of, optimize
from distir_relax.autosharding.serialize import parse_search, print_search
from distir_relax.bundle import Bundle, read_bundle
from distir_relax.errors import BundleError, DistIRError
from distir_relax.ir import Autosharding
from distir_relax.report import explain
from distir_relax.sharding.factor_selection import Placed
from tests.autosharding.test_auto import FAST, model_and_input, peak
from tests.autosharding.test_auto_training import training
from tests.autosharding.test_placements import MACHINE, few_ways, simulated
from tests.machines import link
from tests.runtime.processes import python


@pytest.mark.drawn(13)
@pytest.mark.parametrize("seed", range(900, 940))
def test_the_cost_of_each_layout_is_that_of_the_best_program_with_it(seed: int) -> None:
    """Of all programs, on sizes such as 3, 5 and 7 on meshes of 2, 3, 5 and 2 x 3."""
    graph, _ = few_ways(seed, 1500)
    asked = Alternatives(PlaceBySearch(graph.space.mesh, MACHINE), graph.module)
    costs = compute_costs(graph, MACHINE)
    times = {
        chosen: solution_seconds(graph, costs, chosen)
        for chosen in itertools.product(*(range(len(node.strategies)) for node in graph.nodes))
    }
    for (function, name), (node, result) in graph.sources.items():
        best: dict[Placed, float] = {}
        for chosen, time in times.items():
            lies = graph.nodes[node].strategies[chosen[node]].final_layouts[result]
            best[lies] = min(best.get(lies, time), time)
        assert set(best) == set(asked.layouts(function, name))
        for layout, time in best.items():
            found = asked.best(function, name, layout)
            assert found.outcome is not None
            assert found.outcome.seconds == pytest.approx(time, rel=1e-6), (name, layout)
            assert found.outcome.op_seconds + found.outcome.reshard_seconds == pytest.approx(time, rel=1e-6)


def test_the_best_of_all_layouts_is_the_solution() -> None:
    for seed in range(950, 960):
        graph, _ = few_ways(seed, 1500)
        asked = Alternatives(PlaceBySearch(graph.space.mesh, MACHINE), graph.module)
        found = optimize(graph, cost_table_of(graph, MACHINE))
        for (function, name), (node, result) in graph.sources.items():
            lies = graph.nodes[node].strategies[found.chosen[node]].final_layouts[result]
            outcome = asked.best(function, name, lies).outcome
            assert outcome is not None
            assert outcome.seconds == pytest.approx(found.seconds, rel=1e-6)
            assert outcome.seconds == pytest.approx(simulated(graph, found.chosen), rel=1e-6)


def asked_of(plan: dr.Plan) -> Alternatives:
    bundle = plan.bundle(("torch",))
    found = parse_search(bundle.texts, plan.mesh)
    assert found is not None
    return Alternatives(*found)


def test_a_bundle_tells_what_the_plan_took() -> None:
    model, x = model_and_input()
    plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST)
    record = next(r for r in plan.modules["sharded"].records if isinstance(r, Autosharding))
    asked = asked_of(plan)
    weight = next(i.value for i in plan.modules["sharded"].main.inputs if i.value.name.endswith("1.up.weight"))
    outcome = asked.best("main", weight.name, weight.dtensor.placements).outcome
    assert outcome is not None
    assert outcome.seconds == pytest.approx(record.time * 1e-12, rel=1e-5)
    assert len(asked.same("main", weight.name)) == 3, "a weight of each layer"
    of_plan = plan.alternatives.best("main", weight.name, weight.dtensor.placements).outcome
    assert of_plan is not None
    assert of_plan.seconds == pytest.approx(record.time * 1e-12, rel=1e-9)
    with pytest.raises(DistIRError, match="were not searched"):
        dr.compile(model, (x,), strategy="3/1/1/1").alternatives  # noqa: B018


def explained(bundle: Bundle, end: str) -> str:
    """What is told of the input whose name ends so."""
    names = [weight.name for weight in (*bundle.manifest.inputs, *bundle.manifest.weights)]
    return explain(bundle, next(name for name in names if name.endswith(end)))


def test_explain_tells_the_best_first_and_the_others_by_their_cost() -> None:
    model, x = model_and_input()
    plan = dr.compile(model, (x,), mesh=(2, 3), shardings="auto", profile=FAST)
    said = explained(plan.bundle(("torch",)), "up.weight").splitlines()
    head = next(number for number, line in enumerate(said) if "collectives" in line)
    assert re.match(r"minimum time of a step for \d layouts on by hand with ", said[head - 1])
    assert "(chosen)" in said[head + 1]
    more = [float(found[1]) for line in said[head + 2 :] if (found := re.search(r"\(\+(\S+)%\)", line))]
    assert len(more) >= 2
    assert max(more) > 0
    assert more == sorted(more)


def test_a_layout_without_room_says_how_much_it_needs() -> None:
    """A weight of 305 kB is in the way, whole; a third of it is not."""
    model, x = nn.Sequential(nn.Linear(60, 1270), nn.ReLU(), nn.Linear(1270, 60)).eval(), torch.randn(7, 60)
    slow = replace(FAST, levels=link(1e-3, 1e6))
    free = dr.compile(model, (x,), mesh=3, shardings="auto", profile=slow)
    assert peak(free, slow) > 305e3, "sending costs more than having it whole"
    plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=slow, memory=280e3)
    said = explained(plan.bundle(("torch",)), "0.weight")
    found = re.search(r"\nR: does not fit: needs at least (\d+) kB of 280 kB", said)
    assert found is not None
    assert float(found[1]) > 305


class Marked(nn.Module):
    """A weight that is marked whole on every device, and a result that is marked split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(60, 127), nn.Linear(127, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = dr.DeviceMesh((3,), ("tp",))
        weight = dr.annotate_sharding(self.up.weight, mesh, "S[1]")
        hidden = dr.annotate_sharding(nn.functional.linear(x, weight, self.up.bias), mesh, "S[1: 100|20|7]")
        return self.down(torch.relu(hidden))


def test_a_mark_tells_what_it_costs() -> None:
    plan = dr.compile(Marked().eval(), (torch.randn(7, 60),), mesh=3, shardings="auto", profile=FAST)
    asked = asked_of(plan)
    (mark,) = asked.annotations("main", "linear_1")
    free, lies = asked.without(mark), plan.modules["sharded"].main
    kind = next(v.dtensor for op in lies.ops for v in op.results if v.name == "linear_1")
    kept = asked.best("main", "linear_1", kind.placements).outcome
    assert kept is not None
    assert free.seconds < kept.seconds
    said = explain(plan.bundle(("torch",)), "%linear_1")
    assert re.search(r"annotated S\[1: 100\|20\|7\] at .*: without it a step would take \S+ us less", said)


def test_what_contradicts_a_mark_is_refused() -> None:
    """A weight that is updated where it is lies as it is marked, or not at all."""
    given = dr.Training(
        Marked(), nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=1e-3), example_batch=(torch.randn(7, 60),) * 2
    )
    step = given.compile(mesh=3, shardings="auto", profile=FAST)
    said = explained(step.bundle(("torch",)), "up.weight")
    assert re.search(r"\nR: contradicts annotation S\[1\] at ", said)
    assert re.search(r"\nS\[0\S*.*: contradicts annotation S\[1\] at ", said)


@pytest.mark.sweep
def test_a_step_of_training_is_explained_from_its_folder(tmp_path: Path) -> None:
    step = training().compile(mesh=(2, 3), shardings="auto", profile=FAST)
    step.save(tmp_path / "t.dist", ("torch",))
    done = python("-m", "distir_relax", "explain", tmp_path / "t.dist", "%0.up.weight")
    assert done.returncode == 0, done.stderr
    assert "it has the layout of all equal values: *.up.weight x2" in done.stdout
    assert "(chosen)" in done.stdout
    short = python("-m", "distir_relax", "explain", tmp_path / "t.dist", "%0.up.weight", "--limit", "0")
    assert "more layouts were not evaluated in 0 s" in short.stdout


def test_a_value_in_another_layout_leads_to_the_value() -> None:
    given = training()
    bundle = given.compile(mesh=3, shardings="auto", profile=FAST).bundle(("torch",))
    pending = re.search(r"%(\S+)\.partial: ", bundle.stage("sharded"))
    assert pending is not None, "a gradient is summed over devices"
    assert f"its layout follows from %{pending[1]}: distir explain" in explain(bundle, f"{pending[1]}.partial")


def test_what_is_missing_or_damaged_is_said() -> None:
    model, x = model_and_input(1)
    plan = dr.compile(model, (x,), mesh=3, shardings="auto", profile=FAST)
    texts = dict(plan.bundle(("torch",)).texts)
    with pytest.raises(BundleError, match=r"holds no machine\.toml"):
        parse_search({name: text for name, text in texts.items() if name != "machine.toml"}, plan.mesh)
    with pytest.raises(BundleError, match="expected ragged or pad for 'tail', found 'frayed'"):
        parse_search({**texts, "search.json": texts["search.json"].replace("ragged", "frayed")}, plan.mesh)
    with pytest.raises(BundleError, match="expected a program of the global stage"):
        parse_search({**texts, "global.txt": texts["sharded.txt"]}, plan.mesh)
    with pytest.raises(DistIRError, match="no value %nothing"):
        asked_of(plan).layouts("main", "nothing")


def test_a_search_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, x = model_and_input(1)
    profile = replace(FAST, levels=link(2e-6, 1e10))
    dr.compile(model, (x,), mesh=(2, 3), shardings="auto", profile=profile, memory=1e9, tail="pad").save(
        tmp_path / "m.dist", ("torch",)
    )
    texts = read_bundle(tmp_path / "m.dist").texts
    found = parse_search(texts, dr.DeviceMesh((2, 3), ("axis0", "axis1")))
    assert found is not None
    assert (found[0].memory_limit, found[0].tail) == (1e9, "pad")
    assert print_search(*found) == {name: texts[name] for name in print_search(*found)}
