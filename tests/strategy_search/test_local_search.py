"""Searches by steps: what is ruled out would not fit, what is tried is what each strategy simulates alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.profile import load_profile
from distir_relax.report.search import discarded
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search import Outcome, Search, search_locally
from distir_relax.strategy_search.lower_bounds import RULED_OUT, TOO_FINE, TOO_LARGE, LowerBounds
from tests import search_models
from tests.runtime.processes import mpirun

MACHINE = load_profile("dgx2-v100")
STRATEGIES = [
    "1/1/1/1", "3/1/1/2,zero=1", "3/1/1/2,zero=2", "3/1/1/5,zero=3", "1/3/1/2", "2/1/3/5,zero=1", "2/3/1/1,zero=2",
    "2/1/3/3,zero=2,checkpoint=block", "2/2/2/3,zero=1", "1/1/3/3,schedule=gpipe",
]  # fmt: skip


def narrow() -> dr.Training:
    """Six layers computed in bfloat16, their weights in float32."""
    model, (x,) = search_models.run(30)
    return dr.Training(model, nn.functional.mse_loss, dr.optim.AdamW(), (x, x), precision="bf16")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("made", [narrow, lambda: search_models.train(30)], ids=["bfloat16", "float32"])
def test_no_strategy_needs_less_than_its_weights_and_what_belongs_to_them(made: object) -> None:
    source = made().read(CompileOptions(profile=MACHINE))  # type: ignore[operator]
    least = LowerBounds(source, MACHINE)
    for text in STRATEGIES:
        strategy = Strategy.parse(text)
        needed, found = least.bytes(strategy), source.with_strategy(strategy).simulate(MACHINE)
        peak = float(found.peak_memory.max())
        assert 0.2 * peak < needed <= peak, text
        assert least.refusal(strategy) == ""
        small = LowerBounds(source, replace(MACHINE, memory=0.99 * needed))
        assert small.refusal(strategy) == TOO_LARGE


def test_more_tensor_ranks_than_heads_are_refused() -> None:
    """Two layers with three heads each: a product of heads cannot be cut in five."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 31, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    source = dr.Training(
        model, nn.functional.mse_loss, dr.optim.SGD(), (torch.randn(5, 7, 12), torch.randn(5, 7, 12))
    ).read(CompileOptions(profile=MACHINE))
    least = LowerBounds(source, MACHINE)
    assert [least.refusal(Strategy(1, t, 1, 1)) for t in (1, 3, 5)] == ["", "", TOO_FINE]


OPTIONS = {
    "profile": MACHINE, "global_batch": 60, "microbatches": (2, 5), "zero": (0, 1), "schedules": ("1f1b", "gpipe"),
    "workers": 1,
}  # fmt: skip


# Fewer candidates: the tests compare only how processes share them.
FEWER = {**OPTIONS, "microbatches": (1, 3), "schedules": ("1f1b",)}


@pytest.fixture(scope="module")
def tried() -> Callable[[int], Search]:
    """All candidates for so many devices: what searches by steps are compared with."""
    return cache(lambda devices: dr.search(search_models.train(120), devices=devices, **OPTIONS))


def test_of_a_small_model_all_are_tried(tried: Callable[[int], Search]) -> None:
    """On six devices, against all candidates: the same outcomes, nothing is left."""
    every = tried(6)
    found = dr.search(search_models.train(120), devices=6, by_steps=True, **OPTIONS)  # type: ignore[arg-type]
    assert found.untried == 0
    assert sorted(map(str, found.outcomes)) == sorted(map(str, every.outcomes))
    assert found.ranked[0] == every.ranked[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("devices", "share", "least"), [(6, 2, 1.0), (5, 2, 0.65)])
def test_some_of_the_candidates_lead_near_the_best_of_all(
    devices: int, share: int, least: float, tried: Callable[[int], Search]
) -> None:
    """What half of the candidates show, and that each is what its strategy alone simulates."""
    source = search_models.train(120).read(CompileOptions(profile=MACHINE))
    every = tried(devices)
    ops = len(source.imported.module.main.ops)
    found = search_locally(source, MACHINE, every.space, workers=1, op_budget=ops * len(every.outcomes) // share)
    known = {outcome.strategy: outcome for outcome in every.outcomes}
    assert found.untried > 0
    assert found.untried + len(found.outcomes) == len(every.outcomes)
    assert all(outcome == known[outcome.strategy] for outcome in found.outcomes if not outcome.refused)
    assert found.ranked[0].throughput >= least * every.ranked[0].throughput
    best = found.ranked[0].candidate
    assert Outcome.of(best, source.with_strategy(best.strategy).simulate(MACHINE, 60)) == found.ranked[0]


def test_what_cannot_fit_is_not_compiled() -> None:
    small = replace(MACHINE, memory=2e5)
    found = dr.search(search_models.train(12), devices=3, profile=small, workers=1, by_steps=True)
    assert {outcome.refused for outcome in found.outcomes} == {TOO_LARGE}
    assert discarded(found) == [f"{len(found.outcomes)} were ruled out: {TOO_LARGE}"]


def by_steps(workers: int, resume: Path | None = None) -> Search:
    options: dict[str, Any] = {**FEWER, "workers": workers}
    return dr.search(search_models.train(120), devices=6, by_steps=True, resume=resume, **options)


@pytest.mark.sweep
def test_the_number_of_workers_and_interruptions_change_nothing(tmp_path: Path) -> None:
    """Outcomes are the same, in the same order; what was simulated before an interruption is not simulated again."""
    alone, kept = by_steps(1), tmp_path / "kept.jsonl"
    assert by_steps(3, kept).outcomes == alone.outcomes
    lines = kept.read_text().splitlines()
    simulated = [o for o in alone.outcomes if o.refused not in RULED_OUT]
    assert len(lines) == 1 + len(simulated) > 9
    kept.write_text("\n".join([*lines[:8], lines[8][:20]]))
    resumed = by_steps(2, kept)
    assert resumed.outcomes == alone.outcomes
    assert (resumed.resumed, alone.resumed) == (7, 0)
    assert len(kept.read_text().splitlines()) == len(lines)
    assert by_steps(1, kept).resumed == len(simulated)


@pytest.mark.sweep
@pytest.mark.mpirun
def test_ranks_of_a_launch_search_by_steps(tmp_path: Path) -> None:
    script = tmp_path / "stepping.py"
    script.write_text(
        "import distir_relax as dr\n"
        "from tests import search_models\n"
        f"options = { ({**FEWER, 'profile': MACHINE.name})!r}\n"
        "found = dr.search(search_models.train(120), devices=6, by_steps=True, **options)\n"
        "print([(o.strategy, o.samples, o.seconds) for o in found.outcomes])\n"
    )
    result = mpirun(3, str(script))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(str([(o.strategy, o.samples, o.seconds) for o in by_steps(1).outcomes])) == 3
