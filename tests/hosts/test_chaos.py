"""Launches on hosts to which something happens at a random moment: each ends in time, by name, and leaves nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import distir_relax as dr
from distir_relax.bundle import write_bundle
from tests.hosts.chaos import STEPS, drawn, kind_of
from tests.hosts.clients import PROMPT, TOKENS
from tests.hosts.laboratory import in_namespaces, why_not
from tests.hosts.launches import KINDS
from tests.hosts.trainings import losses_on_one_machine
from tests.runtime.handmade import example_input, mlp_bundle
from tests.serving import small_model
from tests.training import perceptron

SEEDS = 300
SPLITS = {2: [3, 2], 3: [3, 2, 2], 4: [2, 1, 2, 2], 5: [2, 1, 1, 1, 2]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    for ranks, split in SPLITS.items():
        write_bundle(mlp_bundle(split), folder / f"{ranks}.dist")
    np.savez(folder / "x.npz", x=example_input())
    return folder


def assert_ends_well(seed: int, files: Path, seconds: float) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = in_namespaces("tests.hosts.chaos", str(files), str(seed), "1", timeout=seconds)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [], found


@pytest.mark.mpirun
@pytest.mark.timeout(200)
@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", [seed for seed in range(SEEDS) if kind_of(seed) == "calls"])
def test_a_launch_ends_well_whatever_happens(seed: int, files: Path) -> None:
    assert_ends_well(seed, files, 180.0)


@pytest.mark.mpirun
@pytest.mark.timeout(300)
@pytest.mark.sweep
@pytest.mark.parametrize("seed", [seed for seed in range(SEEDS) if kind_of(seed) == "training"])
def test_a_training_resumes_after_failures(seed: int, files: Path) -> None:
    ranks = sum(drawn(seed)[0])
    bundle = files / f"train-{ranks}.dist"
    if not bundle.exists():
        perceptron.saved(f"{ranks}/1/1/1", files, STEPS).rename(bundle)
        losses = [loss for _, loss in losses_on_one_machine(bundle, STEPS)]
        (files / f"losses-{ranks}.json").write_text(json.dumps(losses))
    assert_ends_well(seed, files, 280.0)


@pytest.mark.mpirun
@pytest.mark.timeout(300)
@pytest.mark.sweep
@pytest.mark.parametrize("seed", [seed for seed in range(SEEDS) if kind_of(seed) == "serving"])
def test_a_server_answers_again_after_failures(seed: int, files: Path) -> None:
    ranks = sum(drawn(seed)[0])
    bundle = files / f"serve-{ranks}.dist"
    if not bundle.exists():
        small_model.saved(files, f"1/{ranks}/1/1", heads=6, spread=0.5).rename(bundle)
        (files / f"text-{ranks}.txt").write_text(dr.load(bundle).generate(PROMPT, TOKENS))
    assert_ends_well(seed, files, 280.0)


def test_seeds_draw_every_failure_and_every_number_of_ranks() -> None:
    cases = [drawn(seed) for seed in range(SEEDS)]
    kinds = Counter(failure.kind for _, failures in cases for failure in failures)
    assert all(kinds[kind] > 10 for kind in KINDS)
    assert {sum(slots) for slots, _ in cases} == set(SPLITS)
    assert sum(len(failures) > 1 for _, failures in cases) > 50
