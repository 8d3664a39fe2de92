"""Searches: what is tried, that shared programs say what compiling each would, what is kept, what users are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli import app
from distir_relax.cli.search import SearchProgress
from distir_relax.compiler.inputs import classify_input
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.errors import DistIRError
from distir_relax.report.search import csv_text, table
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search import Candidate, Evaluator, Outcome, Search, Space, search_grid
from distir_relax.strategy_search.compact_timeline import compact_timeline
from distir_relax.strategy_search.search import write_bundles
from distir_relax.strategy_search.search_space import degrees_of
from tests import search_models
from tests.runtime.processes import mpirun

TRAIN, RUN, FIXED = (f"{search_models.__file__}:{name}" for name in ("train", "run", "fixed"))
MACHINE = "dgx2-v100"


def source(batch: int, profile: Profile) -> Source:
    return search_models.train(batch).read(CompileOptions(profile=profile))


def test_progress_without_terminal_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [Outcome(f"1/{n}/1/1", 8, 0.5 * n, 1, True) for n in (1, 2)]
    for seconds in (30.0, 0.0):
        with SearchProgress(seconds) as progress:
            for outcome in outcomes:
                progress.update(outcome, 3)
    lines = ["1 of 3 configurations, 1/1/1/1 16/s", "2 of 3 configurations, 1/1/1/1 16/s"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.drawn(1)
@pytest.mark.parametrize("make", [search_models.run, search_models.train])
def test_larger_batch_repeats_the_example(make: Callable[[int], Any]) -> None:
    found, expected = (
        dr.search(make(samples), devices=3, profile=MACHINE, global_batch=(9, 27), microbatches=(3,), workers=1)
        for samples in (9, 54)
    )
    assert sorted(map(repr, found.outcomes)) == sorted(map(repr, expected.outcomes))


def test_larger_batch_is_named_where_the_model_cannot_have_it() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.linear(x.reshape(4, 3, 2).flatten(1))

    with pytest.raises(DistIRError, match=r"example of 4 samples can be imported, one of 128, for global_batch 64, ca"):
        dr.search((Fixed().eval(), (torch.randn(4, 6),)), devices=2, profile=MACHINE, global_batch=64, workers=1)


def test_executed_batch_is_that_of_the_prediction(tmp_path: Path) -> None:
    for samples in (3, 27):
        outcome = Outcome("3/1/1/1", samples, 1.0, 1, True)
        (path,) = write_bundles(FIXED, [outcome], load_profile(MACHINE), tmp_path / str(samples))
        assert read_bundle(path).manifest.inputs[0].shape[0] == samples


def test_the_papers_grid_is_tried() -> None:
    """16 devices are 15 products of three degrees; with 2 to 128 microbatches, of batches that are large enough, 75."""
    assert len(degrees_of(16)) == 15
    assert degrees_of(6) == [
        (1, 1, 6), (1, 2, 3), (1, 3, 2), (1, 6, 1), (2, 1, 3), (2, 3, 1),
        (3, 1, 2), (3, 2, 1), (6, 1, 1),
    ]  # fmt: skip
    assert len(Space(16, (4096,)).candidates()) == 75
    assert len(Space(16, tuple(1 << n for n in range(7, 21))).candidates()) == 1035
    alone = Space(1, (7,), trained=True, microbatches=(1, 3, 9)).candidates()
    assert [str(c.strategy) for c in alone] == ["1/1/1/1", "1/1/1/3"]
    options = Space(
        3, (9,), True, (1, 3), schedules=("1f1b", "zb-v"), chunks=(1, 2), zero=(0, 1), checkpoint=("none", "block"),
        sequence_parallel=(False, True),
    )  # fmt: skip
    names = [str(c.strategy) for c in options.candidates()]
    assert "1/1/3/3,schedule=zb-v,chunks=2,checkpoint=block" in names
    assert "3/1/1/1,zero=1" in names
    assert not [name for name in names if name.startswith("1/1/3") and ("zero" in name or "sequence" in name)]
    assert len(names) == len(set(names))
    with pytest.raises(DistIRError, match="at least 1"):
        Space(0, (4,))


@pytest.mark.sweep
def test_models_with_dropout_are_divided_into_microbatches() -> None:
    """The positions of samples, which dropout reads, are no sum over microbatches, of which a search runs a few."""
    layers = [torch.nn.Linear(5, 7), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(7, 3)]
    batch = torch.randn(29, 5), torch.randn(29, 3)
    training = dr.Training(torch.nn.Sequential(*layers), torch.nn.functional.mse_loss, example_batch=batch)
    search = dr.search(training, devices=2, profile=MACHINE, microbatches=(1, 4, 7, 13), workers=1)
    assert not search.refused
    assert len(search.outcomes) == 11
    for outcome in search.outcomes:
        alone = dr.simulate(training, profile=MACHINE, strategy=outcome.strategy)
        assert outcome.seconds == pytest.approx(alone.makespan, rel=1e-9), outcome.strategy


def test_what_is_found_is_what_each_strategy_simulates_alone() -> None:
    """Programs between two others, and of other numbers of microbatches, against each compiled by itself."""
    profile = load_profile(MACHINE)
    space = Space(
        6,
        (12, 30, 36, 60, 61),
        True,
        (1, 2, 3, 5),
        schedules=("1f1b", "gpipe"),
        zero=(0, 1),
        checkpoint=("none", "block"),
    )
    candidates = space.candidates()
    large = source(2 * 61, profile)
    evaluator = Evaluator(large, profile, candidates)
    between = 0
    for candidate in candidates[::43]:
        alone = large.with_strategy(candidate.strategy).simulate(profile, candidate.samples)
        between += evaluator._interpolate(candidate) is not None
        assert evaluator.outcome(candidate) == Outcome.of(candidate, alone)
    assert between > 5


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["2/1/3/3", "1/3/2/3,schedule=gpipe", "1/1/3/3,zero=0,checkpoint=block"])
def test_other_numbers_of_equal_microbatches_share_simulated_calls(strategy: str) -> None:
    """The second to last have calls of the first, and so have the allocators of their devices."""
    profile = load_profile(MACHINE)
    assert profile.caching_allocator
    parsed = Strategy.parse(strategy)
    counts = (3, 5, 17)
    candidates = [Candidate(parsed.replace(microbatches=k), size * k) for size in (4, 8, 10) for k in counts]
    large = source(400, profile)
    evaluator = Evaluator(large, profile, candidates)
    for candidate in candidates:
        alone = large.with_strategy(candidate.strategy).simulate(profile, candidate.samples)
        found = evaluator.simulate(candidate)
        assert (found.makespan, found.device_ops) == (alone.makespan, alone.device_ops)
        assert [str(peak) for peak in found.peaks] == [str(peak) for peak in alone.peaks]
        assert found.peak_memory.tolist() == alone.peak_memory.tolist()
        reserved = [found.reserved(device) for device in range(found.devices)]
        assert reserved == [alone.reserved(device) for device in range(found.devices)]
        assert None not in reserved
        assert [(e.start, e.duration, e.classes) for e, _ in found.events()] == [
            (e.start, e.duration, e.classes) for e, _ in alone.events()
        ]
    programs = {size for _, size in evaluator._programs}
    assert programs == {4, 8, 10}


@pytest.mark.parametrize("make", [search_models.run, search_models.train])
def test_what_is_found_of_a_batch_is_what_a_model_of_that_batch_simulates(make: Callable[[int], Any]) -> None:
    """The model of a search is read in with a larger batch; here is one of its own size. Without a pipeline, since
    stages are cut as for the larger one."""
    profile = load_profile(MACHINE)
    space = Space(3, (35,), make is search_models.train, (1, 5))
    candidates = [c for c in space.candidates() if c.strategy.pipeline == 1]
    assert "1/3/1/1" in {str(c.strategy) for c in candidates}
    own, larger = (classify_input(make(samples)).read(CompileOptions(profile=profile)) for samples in (35, 97))
    evaluator = Evaluator(larger, profile, candidates)
    for candidate in candidates:
        alone = own.with_strategy(candidate.strategy).simulate(profile)
        found = evaluator.simulate(candidate)
        assert found.peak_memory.tolist() == alone.peak_memory.tolist()
        # The mean over a part of all samples is a sum and a product.
        assert found.makespan == pytest.approx(alone.makespan, rel=1e-9, abs=1.01 * profile.overhead)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "strategy", ["2/1/3/5", "1/3/2/2,schedule=gpipe", "6/1/1/1,zero=1", "1/1/3/4,checkpoint=block"]
)
def test_a_program_in_between_is_the_one_that_is_compiled(strategy: str) -> None:
    profile = load_profile(MACHINE)
    parsed = Strategy.parse(strategy)
    unit = parsed.data * parsed.microbatches
    candidates = [Candidate(parsed, unit * n) for n in (2, 5, 7)]
    evaluator = Evaluator(source(unit * 14, profile), profile, candidates)
    for candidate in candidates:
        program, compiled = evaluator._interpolate(candidate), evaluator._compile(candidate)
        assert program is not None
        found, _ = program
        assert [str(op) for op in found.main.ops] == [str(op) for op in compiled.main.ops]
        for one, other in zip(found.functions, compiled.functions, strict=True):
            assert [v.type for op in one.ops for v in op.results] == [v.type for op in other.ops for v in op.results]
            assert [op.attrs for op in one.ops] == [op.attrs for op in other.ops]


def test_the_best_is_the_fastest_that_fits_by_brute_force() -> None:
    # An allocator would reserve whole megabytes.
    tight = replace(load_profile(MACHINE), caching_allocator=False)
    options: dict[str, Any] = {"devices": 6, "global_batch": [24, 30], "microbatches": (2,), "zero": (0, 1)}
    found = dr.search(TRAIN, profile=tight, workers=1, **options)
    memory = sorted(outcome.memory for outcome in found.outcomes)[len(found.outcomes) // 2]
    tight = replace(tight, memory=float(memory))
    again = dr.search(TRAIN, profile=tight, workers=2, **options)
    assert [o.seconds for o in again.outcomes] == [o.seconds for o in found.outcomes]
    fitting = [o for o in found.outcomes if o.memory <= memory]
    assert again.ranked[0].throughput == max(o.throughput for o in fitting)
    assert len(again.ranked) == len(fitting)
    assert len(again.too_large) == len(found.outcomes) - len(fitting)
    assert {batch: o.seconds for batch, o in again.best_by_batch().items()} == {
        batch: min(o.seconds for o in fitting if o.samples == batch) for batch in (24, 30)
    }
    assert "do not fit into" in table(again)


def test_a_search_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    """Stopped in the midst of it, the next one asks only for the rest; another model is refused."""
    profile = load_profile(MACHINE)
    kept = tmp_path / "kept.jsonl"
    space = Space(4, (8, 16), True, (1, 2))
    model = source(32, profile)
    seen: list[Outcome] = []

    class Stopped(BaseException):
        pass

    def tell(outcome: Outcome, total: int) -> None:
        seen.append(outcome)
        if len(seen) == 5:
            raise Stopped

    with pytest.raises(Stopped):
        search_grid(model, profile, space, workers=1, resume=kept, on_outcome=tell, draw=compact_timeline)
    # The line that was being written when a machine went down is lost, and nothing else.
    kept.write_text(kept.read_text() + '{"strategy": "1/1')
    found = search_grid(model, profile, space, workers=1, resume=kept)
    assert found.resumed == 5
    assert [bool(outcome.lanes) for outcome in found.outcomes] == [outcome in seen for outcome in found.outcomes]
    assert all(outcome.lanes == compact_timeline(found.simulate(outcome.candidate)) for outcome in seen)
    assert found.outcomes == search_grid(model, profile, space, workers=1).outcomes
    assert search_grid(model, profile, space, workers=1, resume=kept).resumed == len(found.outcomes)
    other = search_models.train(34).read(CompileOptions(profile=profile))
    with pytest.raises(DistIRError, match="found those of another search"):
        search_grid(other, profile, space, workers=1, resume=kept)
    head = kept.read_text().splitlines()[0]
    row = '{"strategy": "1/1/1/1", "samples": 8, "seconds": 1.0, "memory": 7, "fits": 1, "bubble": 0.0}'
    for text in (
        "not a search",
        "{}",
        "[]",
        '{"search": 1}',
        f"{head}\n[]\n{head}\n",
        f"{head}\n{row}\n",
        f"{head}\n{json.dumps({**seen[0].as_row(), 'lanes': [['device 0']]})}\n",
        f"{head}\n{'[' * 99}}}",
    ):
        kept.write_text(text)
        with pytest.raises(DistIRError):
            search_grid(model, profile, space, workers=1, resume=kept)
        assert kept.read_text() == text
    kept.write_bytes(b"\xff\xfe")
    with pytest.raises(DistIRError):
        search_grid(model, profile, space, workers=1, resume=kept)
    with pytest.raises(DistIRError, match="cannot write the results"):
        search_grid(model, profile, space, workers=1, resume=tmp_path / "none" / "kept.jsonl")


def run_cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["search", *arguments])


def test_the_command_tells_the_best_as_table_json_and_csv(tmp_path: Path) -> None:
    options = ["--devices", "3", "--profile", MACHINE, "--global-batch", "9,27", "--workers", "1", "--top", "2"]
    text = run_cli(RUN, *options, "--csv", str(tmp_path / "all.csv"))
    assert text.exit_code == 0, text.output
    assert "throughput" in text.output
    result = json.loads(run_cli(RUN, *options, "--json").output)
    found = dr.search(RUN, devices=3, profile=MACHINE, global_batch=(9, 27), workers=1)
    assert result == found.as_json(2)
    assert result["configurations"] == len(found.outcomes)
    assert [row["strategy"] for row in result["best"]] == [o.strategy for o in found.ranked[:2]]
    assert (tmp_path / "all.csv").read_text().splitlines()[1] == csv_text(found).splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([RUN, "--devices", "99", "--profile", MACHINE], "the profile dgx2-v100 has 16"),
        ([RUN, "--devices", "3", "--profile", MACHINE, "--global-batch", "9x"], "expected 4096"),
        ([RUN, "--devices", "3", "--profile", MACHINE, "--global-batch", "9-8"], "expected 4096"),
        ([RUN, "--devices", "3", "--profile", MACHINE, "--sequence-parallel", "yes"], "expected on or off"),
        ([RUN, "--devices", "3", "--profile", MACHINE, "--schedules", "none"], "expected a schedule"),
        ([RUN, "--devices", "3", "--profile", MACHINE, "--chunks", "a"], "expected a number"),
        ([RUN, "--devices", "3", "--profile", "no-machine"], "no-machine"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str) -> None:
    result = run_cli(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, DistIRError)
    assert message in str(result.exception)


def test_a_model_that_cannot_be_split_so_says_why() -> None:
    """Six layers cannot be seven stages: that is no error of the search."""
    found = dr.search(RUN, devices=7, profile=MACHINE, global_batch=14, workers=1)
    assert {outcome.strategy.split("/")[2] for outcome in found.refused} == {"7"} or not found.refused
    assert len(found.ranked) + len(found.refused) + len(found.too_large) == len(found.outcomes)


def test_nothing_fits() -> None:
    small = load_profile(MACHINE)
    small = Profile(**{**{f: getattr(small, f) for f in small.__dataclass_fields__}, "memory": 1e4})
    found = dr.search(FIXED, devices=3, profile=small, workers=1)
    assert not found.ranked
    assert "needs least" in table(found)
    assert isinstance(found, Search)


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_the_best_are_executed() -> None:
    """On two ranks of this machine, in float32: what they take is measured."""
    options = ["--devices", "2", "--profile", "cpu-local", "--global-batch", "8", "--workers", "1", "--json"]
    result = run_cli(RUN, *options, "--execute", "2")
    assert result.exit_code == 0, result.output
    executed = json.loads(result.output.splitlines()[-1])["executed"]["outcomes"]
    assert len(executed) == 2
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in executed)


@pytest.mark.mpirun
def test_ranks_of_a_launch_share_the_work(tmp_path: Path) -> None:
    script = tmp_path / "searching.py"
    script.write_text(
        "import distir_relax as dr\n"
        f"found = dr.search({RUN!r}, devices=4, profile={MACHINE!r}, global_batch=(8, 16))\n"
        "print([(o.strategy, o.samples, o.seconds) for o in found.outcomes])\n"
    )
    alone = dr.search(RUN, devices=4, profile=MACHINE, global_batch=(8, 16), workers=1)
    result = mpirun(3, str(script))
    assert result.returncode == 0, result.stderr
    expected = str([(o.strategy, o.samples, o.seconds) for o in alone.outcomes])
    assert result.stdout.count(expected) == 3


def test_weights_are_not_needed() -> None:
    with torch.device("meta"):
        model, _ = search_models.run()
        x = torch.empty(8, search_models.WIDTH)
    found = dr.search((model, (x,)), devices=2, profile=MACHINE, workers=1)
    assert found.ranked
