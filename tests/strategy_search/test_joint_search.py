"""Searches in which placements of the stages are looked for, too: never worse than by rules, and as simulated alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from distir_relax.cli import app
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.profile import load_profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module
from distir_relax.lowering import Microbatches
from distir_relax.strategy_search import Outcome, Space, search_grid
from tests import search_models

MACHINE = "dgx2-v100"


def test_meshes_that_are_one_are_tried_once() -> None:
    names = [str(c.strategy) for c in Space(6, (12,), microbatches=(2,), placements=("rules", "auto")).candidates()]
    assert [name.removesuffix(",placements=auto") for name in names if "auto" in name] == [
        "1/2/3/2", "1/3/2/2", "1/6/1/1", "2/3/1/1", "3/2/1/1",
    ]  # fmt: skip
    alone = [str(c.strategy) for c in Space(6, (12,), microbatches=(2,), placements=("auto",)).candidates()]
    assert alone[0] == "1/1/6/2,placements=auto"
    assert len(alone) == 6
    with pytest.raises(DistIRError, match="placements is rules, auto, found 'best'"):
        Space(6, (12,), placements=("best",))


def test_the_best_is_at_least_as_good_as_by_rules() -> None:
    profile = load_profile(MACHINE)
    source = search_models.train(60).read(CompileOptions(profile=profile))
    space = Space(6, (15,), True, (3,), schedules=("1f1b",), checkpoint=("none", "block"), placements=("rules", "auto"))
    found = search_grid(source, profile, space, workers=1)
    by_rules = [o for o in found.ranked if "auto" not in o.strategy]
    assert by_rules[0].throughput <= found.ranked[0].throughput
    searched = [outcome for outcome in found.outcomes if "auto" in outcome.strategy]
    assert len(searched) > 9
    assert not [outcome.refused for outcome in searched if outcome.refused]
    for outcome in searched[::7]:
        candidate = outcome.candidate
        alone = source.with_strategy(candidate.strategy).simulate(profile, candidate.samples)
        assert outcome == Outcome.of(candidate, alone)


@pytest.mark.sweep
def test_what_is_laid_out_is_written_out_once_for_all_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int | None]] = []
    run = Microbatches.run

    def counted(self: Microbatches, module: Module) -> Module:
        written.append((self.count, self.samples))
        return run(self, module)

    monkeypatch.setattr(Microbatches, "run", counted)
    profile = load_profile(MACHINE)
    source = search_models.train(60).read(CompileOptions(profile=profile))
    space = Space(6, (15, 21), True, (3,), placements=("auto",))
    candidates = [candidate for candidate in space.candidates() if candidate.strategy.pipeline == 1]
    assert {candidate.strategy.mesh.shape for candidate in candidates} == {(1, 6), (2, 3), (3, 2)}
    search = search_grid(source, profile, space, workers=1)
    found = {outcome.candidate: outcome for outcome in search.outcomes}
    sizes = {(c.strategy.pipeline, c.strategy.microbatches, c.samples) for c in found}
    assert len(written) == len(sizes) < len(found)
    for candidate in candidates[::3]:
        alone = source.with_strategy(candidate.strategy).simulate(profile, candidate.samples)
        assert found[candidate] == Outcome.of(candidate, alone)


@pytest.mark.sweep
def test_memory_that_rules_overstep_is_kept_to() -> None:
    profile = replace(load_profile(MACHINE), in_place=True, caching_allocator=False)
    # Updates in program order: as soon as gradients are complete, they need as little memory by rules.
    source = search_models.train(30).read(CompileOptions(profile=profile, overlap=0))
    space = Space(4, (15,), True, (1,), placements=("rules", "auto"))
    free = search_grid(source, profile, space, workers=1)
    # Less than any strategy by rules needs without a pipeline.
    least = min(o.memory for o in free.outcomes if "auto" not in o.strategy and "/1/1" in o.strategy)
    small = replace(profile, memory=0.98 * least)
    source = search_models.train(30).read(CompileOptions(profile=small, overlap=0))
    found = search_grid(source, small, space, workers=1)
    assert [o.strategy for o in found.ranked if "auto" in o.strategy and "/1/1" in o.strategy]


def test_on_the_command_line() -> None:
    arguments = [
        "search", f"{search_models.__file__}:run", "--devices", "3", "--profile", MACHINE, "--global-batch", "9",
        "--microbatches", "2", "--placements", "rules,auto", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["configurations"] == 4
    assert any(row["strategy"] == "1/3/1/1,placements=auto" for row in found["best"])
