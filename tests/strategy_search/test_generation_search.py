"""Search for a strategy that generates text: outcomes are simulations, ordered by the objective."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.cost.heterogeneous import Group
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.report.generation_search import table
from distir_relax.serving import EngineOptions
from distir_relax.strategy_search.generation import GenerationSearch, search_generation
from tests.machines import link, machine
from tests.serving.test_engine import compiled, model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shares("engine")]
WORKLOAD: dict[str, int] = {"prompt": 9, "generate": 4, "requests": 5}
MACHINE = machine(4, link(1e-6, 1e7), flops=1e6)


@pytest.fixture(scope="module")
def found() -> GenerationSearch:
    return search_generation(model("gpt2"), devices=4, profile=MACHINE, **WORKLOAD)


@pytest.mark.sweep
def test_all_factorizations_are_simulated(found: GenerationSearch) -> None:
    """With 2 replicas, one has 3 of the 5 requests."""
    strategies = {(outcome.replicas, outcome.strategy) for outcome in found.outcomes}
    assert strategies == {
        (4, "1/1/1/1"), (2, "1/2/1/1"), (2, "1/1/2/1"), (1, "1/4/1/1"), (1, "1/2/2/1"), (1, "1/1/4/1"),
    }  # fmt: skip
    for outcome in found.outcomes:
        if outcome.strategy in ("1/2/1/1", "1/1/1/1"):
            alone = dr.simulate_generation(
                compiled("gpt2", outcome.strategy), profile=MACHINE, prompt=9, generate=4,
                requests={4: 2, 2: 3}[outcome.replicas],
            )  # fmt: skip
            assert outcome.simulation is not None
            assert outcome.simulation.seconds == alone.seconds
            assert outcome.throughput == 5 * 4 / alone.seconds


def test_the_order_is_that_of_the_objective(found: GenerationSearch) -> None:
    orders = []
    for objective in ("throughput", "first-token", "per-token"):
        ranked = replace(found, objective=objective).ranked
        orders.append([outcome.strategy for outcome in ranked])
        for better, worse in pairwise(ranked):
            a, b = better.simulation, worse.simulation
            assert a is not None
            assert b is not None
            assert a.per_token is not None
            assert b.per_token is not None
            assert {
                "throughput": better.throughput >= worse.throughput,
                "first-token": fmean(a.first_token) <= fmean(b.first_token),
                "per-token": fmean(a.per_token) <= fmean(b.per_token),
            }[objective]
    # A slow machine with fast links: splitting each product beats replicas for the first token.
    assert orders[0] != orders[1] or orders[1] != orders[2]


@pytest.mark.sweep
def test_what_does_not_fit_is_not_ranked() -> None:
    whole = dr.simulate_generation(compiled("gpt2"), profile=MACHINE, **WORKLOAD)
    small = replace(MACHINE, memory=0.9 * sum(whole.weights))
    found = search_generation(model("gpt2"), devices=2, profile=small, **WORKLOAD)
    assert [outcome.replicas for outcome in found.too_large] == [2]
    assert {outcome.replicas for outcome in found.ranked} == {1}
    limits = EngineOptions(memory=1500, max_requests=1)
    refused = search_generation(model("gpt2"), devices=2, profile=MACHINE, options=limits, **WORKLOAD).refused
    assert any("which fit into memory" in outcome.refused for outcome in refused)


def test_unlike_devices_have_one_replica_on_all_or_on_the_fastest() -> None:
    unlike = replace(MACHINE, groups=(Group(((0, 0),), 0.5), Group(((1, 1),), 2.0)))
    found = search_generation(model("gpt2"), devices=2, profile=unlike, **WORKLOAD)
    assert [(outcome.strategy, outcome.devices) for outcome in found.outcomes] == [
        ("1/2/1/1", ()), ("1/1/2/1", ()), ("1/1/2/1", (1, 0)), ("1/1/1/1", (1,)),
    ]  # fmt: skip
    other_way = replace(MACHINE, groups=(Group(((1, 1),), 0.5), Group(((0, 0),), 2.0)))
    seconds = [outcome.simulation.seconds for outcome in found.outcomes if outcome.simulation is not None]
    stages = search_generation(model("gpt2"), devices=2, profile=other_way, **WORKLOAD).outcomes
    turned = {outcome.devices: outcome.simulation for outcome in stages if outcome.strategy == "1/1/2/1"}
    for expected, order in ((seconds[1], (1, 0)), (seconds[2], ())):
        simulation = turned[order]
        assert simulation is not None
        assert simulation.seconds == expected
    fast = dr.simulate_generation(compiled("gpt2"), profile=unlike.without(1), **WORKLOAD)
    assert seconds[3] == fast.seconds


def test_the_fastest_device_is_proposed_where_splitting_loses() -> None:
    slow = replace(MACHINE, levels=link(1.0, 1e3), groups=(Group(((1, 1),), 2.0),))
    text = table(search_generation(model("gpt2"), devices=2, profile=slow, **WORKLOAD))
    assert "device 1 alone is faster than all 2 devices together: use it alone" in text
    assert text.splitlines()[3].startswith("1/1/1/1 on 1 ")
    quick = replace(MACHINE, groups=(Group(((1, 1),), 1.1),))
    assert "alone is faster" not in table(search_generation(model("gpt2"), devices=2, profile=quick, **WORKLOAD))


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["search", *map(str, arguments), "--profile", "cpu-local"])


def test_the_command(tmp_path: Path) -> None:
    model("gpt2").save_pretrained(tmp_path / "gpt2")
    ran = command(tmp_path / "gpt2", "--devices", 2, "--prompt", 9, "--generate", 4, "--objective", "first-token")
    lines = ran.output.splitlines()
    assert lines[0].startswith("3 configurations of 2 devices on cpu-local, by first token, in ")
    assert lines[2].split() == ["strategy", "replicas", "tokens/s", "first", "token", "each", "token", "memory", "idle"]
    assert len(lines) == 6
    (tmp_path / "made.py").write_text(
        "from tests.serving.test_engine import compiled\n\n\n"
        "def build(strategy):\n    return compiled('gpt2', str(strategy))\n\n\n"
        "def number(strategy):\n    return 3\n\n\n"
        "def none():\n    return compiled('gpt2')\n"
    )
    target = f"{tmp_path / 'made.py'}:build"
    ran = command(target, "--devices", 2, "--prompt", 9, "--generate", 4, "--objective", "first-token", "--json")
    best = json.loads(ran.output)["best"]
    assert [outcome["strategy"] for outcome in best] == [line.split()[0] for line in lines[3:]]
    for name, expected in {"number": "returns a Generation, found int", "none": "no parameter strategy"}.items():
        ran = command(f"{tmp_path / 'made.py'}:{name}", "--devices", 2, "--prompt", 9, "--generate", 4)
        assert isinstance(ran.exception, DistIRError)
        assert expected in str(ran.exception)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DistIRError, match="expected an objective of throughput, first-token, per-token, found 'speed'"):
        search_generation(model("gpt2"), devices=2, profile=MACHINE, objective="speed", **WORKLOAD)
    with pytest.raises(DistIRError, match="5 devices were requested, the profile"):
        search_generation(model("gpt2"), devices=5, profile=MACHINE, **WORKLOAD)
    with pytest.raises(ImportModelError, match="expected a torch module, or the path of a model, found int"):
        search_generation(3, devices=2, profile=MACHINE, **WORKLOAD)
    for arguments, expected in {
        ("--prompt", 9): "found no --generate",
        ("--prompt", 9, "--generate", 1, "--workers", 2): "expected no --workers with --prompt and --generate",
        ("--prompt", 9, "--generate", 1, "--zero", 1): "expected no --zero with --prompt and --generate",
    }.items():
        ran = command(tmp_path, "--devices", 2, *arguments)
        assert isinstance(ran.exception, DistIRError)
        assert expected in str(ran.exception)
