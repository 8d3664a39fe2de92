"""The benchmark of searches' regret: what it counts, and one search run on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import regret
from benchmarks.regret import CASES, Case, Regret
from distir_relax import load_profile


def test_regret_is_of_the_predicted_best() -> None:
    """The first is the predicted best; a step counts as long as in its fastest pass."""
    one = Regret("a", 7, ("x", "y", "z"), (2.0, 3.0, 5.0), [(1.7, 1.0, 1.2), (1.5, 1.1, 1.3)])
    assert one.seconds == [1.5, 1.0, 1.2]
    assert one.share == pytest.approx(0.5)
    other = Regret("b", 7, ("x", "y", "z"), (1.0, 2.0, 5.0), [(1.0, 1.5, 1.2)])
    assert other.share == 0.0
    third = Regret("c", 7, ("x", "y", "z"), (1.0, 2.0, 5.0), [(1.1, 1.0, 1.2)])
    told = regret.summary([one, other, third])
    assert told.startswith("3 searches: regret 20.0% in the mean, 10.0% in the median, 50.0% at worst")
    assert told.endswith("in 1")


def test_there_are_searches_enough() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) >= 20
    assert {case.ranks for case in CASES} == {1, 2}


@pytest.mark.sweep
@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_the_best_three_of_a_search_are_run(tmp_path: Path) -> None:
    profile, kept = load_profile("cpu-local"), tmp_path / "regret.json"
    cases = [Case("mlp_deep", 2, 3), Case("mlp_deep", 2, 2)]
    folders = [tmp_path / str(case.batch) for case in cases]
    found = [regret.prepare(case, profile, folder) for case, folder in zip(cases, folders, strict=True)]
    regret.write(regret.run_pass(found, folders, profile, steps=2), kept)
    for one, before in zip(regret.read(kept), found, strict=True):
        assert len(set(one.strategies)) == 3 <= one.candidates
        assert one.predicted == before.predicted == sorted(one.predicted)
        assert len(one.measured) == 1
        assert all(0 < seconds < 60 for seconds in one.seconds)
        assert one.share >= 0
