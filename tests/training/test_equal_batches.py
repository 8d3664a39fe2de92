"""Batches that differ between ranks, at any step, in training and in evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli.app import app
from distir_relax.runtime.training.batches import Samples
from distir_relax.runtime.training.data_sources import open_data
from distir_relax.runtime.training.equal_batches import difference
from distir_relax.support.tensor_bytes import tensor_checksum
from tests.runtime.processes import mpirun
from tests.training import data, perceptron
from tests.training.data import Batch, drawn

FILE = Path(__file__)


def unseeded(start: int) -> Iterator[Batch]:
    """Batches whose targets have noise from the fourth on, which no rank seeds."""
    for number, (x, target) in enumerate(data.batches(start), start):
        yield x, target + (random.SystemRandom().random() if number >= 3 else 0)


class Noisy(data.Table):
    """A data set that augments its samples by a generator that nobody has seeded."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().__getitem__(index)
        return x + random.SystemRandom().random(), target


def noisy() -> Noisy:
    """The data set."""
    return Noisy()


def held_out() -> list[Batch]:
    """Batches to evaluate, of which the second differs."""
    (x, target), other = data.held_out()
    return [(x, target), (other[0] + random.SystemRandom().random(), other[1])]


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unseeded", (), "in step 4 rank 1 has other numbers for the input 'targets' than rank 0"),
        ("noisy", (), "in step 1 rank 1 has other numbers for the input 'x' than rank 0"),
        (
            "batches",
            ("--evaluation", f"{FILE}:held_out"),
            "in batch 2 of the evaluation rank 1 has other",
        ),
    ],
)
def test_a_difference_names_step_rank_and_input(
    name: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """By tensor both ranks read all rows; an evaluation has the same check."""
    path = perceptron.step("1/2/1/1", evaluates=bool(options)).save(tmp_path / "step.dist", ("torch",))
    file = data.__file__ if name == "batches" else FILE
    done = mpirun(2, "-m", "distir_relax", "train", path, "--data", f"{file}:{name}", "--steps", 9, *options)
    assert done.returncode == 2, done.stdout
    assert f"the ranks get different batches: {message}" in done.stderr
    assert done.stderr.count("error: ") == 1


def test_checksums_are_of_every_number_and_of_its_place() -> None:
    manifest = perceptron.step("1/1/1/1").bundle(()).manifest
    x, target = drawn(0)

    def sums(x: torch.Tensor) -> dict[str, int]:
        batch = open_data([(x, target)], manifest, 0).batch(0)
        assert batch is not None
        return batch.checksums(0)

    others = {n: x.clone() for n in range(x.numel())}
    for n, other in others.items():
        other.view(-1)[n] += 2.0**-20
    others |= {-1: x.flip(0), -2: x.flip(1), -3: -x}
    expected = sums(x)
    assert [*expected] == ["x", "targets"]
    assert sums(x.clone()) == expected
    assert all(sums(other)["x"] != expected["x"] for other in others.values())
    wrong = difference([expected, sums(x), {"x": 3}], "step 8")
    assert wrong is not None
    assert "in step 8 rank 2 has other numbers for the input 'x' than rank 0" in wrong.message


def test_checksums_of_large_tensors_find_other_samples() -> None:
    """Blocks of each sample are read, in the time of a megabyte."""
    images = torch.randn(64, 3, 127, 127)
    expected = tensor_checksum(images)
    assert expected == tensor_checksum(images.clone()) != tensor_checksum(images, most=images.nbytes)
    for number in (0, 5, 63):
        other = images.clone()
        other[number] += 1
        assert tensor_checksum(other) != expected
    assert tensor_checksum(images.flip(0)) != expected
    other = images.clone()
    other[-1, -1, -1, -1] += 1
    assert tensor_checksum(other) != expected


@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "2/1/1/3", "1/1/2/2"])
def test_samples_are_read_once_and_compared_where_ranks_share_rows(strategy: str) -> None:
    manifest = perceptron.step(strategy).bundle(()).manifest
    table = data.Table()
    batch = Samples(manifest, table, 7).batch(0)
    sums = [batch.checksums(rank) for rank in range(manifest.mesh.size)]
    assert difference(sums, "step 1") is None
    shared = {key for key in sums[0] if key in sums[1]}
    assert bool(shared) == (strategy == "1/3/1/1")
    table.read = []
    for rank in range(manifest.mesh.size):
        fresh = Samples(manifest, table, 7).batch(0)
        fresh.checksums(rank)
        count = len(table.read)
        fresh.local(rank, "cpu")
        assert len(table.read) == count
        table.read = []


def test_one_process_computes_no_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distir_relax.runtime.training.batches.tensor_checksum", lambda *_: pytest.fail("computed"))
    path = perceptron.saved("3/1/1/1", tmp_path)
    assert dr.train(path, unseeded, steps=5).step == 5
    assert dr.train(path, noisy, steps=3).step == 3
    done = CliRunner().invoke(app, ["train", str(path), "--data", f"{FILE}:unseeded", "--steps", "5"])
    assert done.exit_code == 0, done.output
