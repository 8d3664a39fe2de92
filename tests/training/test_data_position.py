"""The data of runs that continue: with another batch size, at the end of an epoch, and on the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import distir_relax as dr
from distir_relax.checkpoints import DataPosition, latest
from distir_relax.errors import CheckpointError, RunError
from distir_relax.runtime.training.data_sources import open_data
from tests.training import data, observers, perceptron
from tests.training.data import Batch

COUNT = 37


class Numbered(Dataset[Batch]):
    """Samples whose first input is their number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Batch:
        return torch.tensor([float(index)] * 5), torch.zeros(3)


class Streamed(IterableDataset[Batch]):
    """The samples in their order."""

    def __iter__(self) -> Iterator[Batch]:
        return (Numbered()[index] for index in range(COUNT))


def bundle(rows: int) -> dr.TrainingStep:
    torch.manual_seed(0)
    example = torch.randn(rows, 5), torch.randn(rows, 3)
    return dr.compile_training(torch.nn.Linear(5, 3), mse_loss, optimizer=dr.optim.SGD(0.0), example_batch=example)


def loader(rows: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_size=rows, drop_last=True, **options)


def batches(rows: int) -> list[Batch]:
    return [tuple(map(torch.stack, zip(*(Numbered()[i] for i in range(start, start + rows)), strict=True)))
            for start in range(0, COUNT - rows + 1, rows)]  # fmt: skip


def read(step: dr.TrainingStep, source: Any, count: int, at: DataPosition) -> tuple[list[int], DataPosition]:
    """Return the numbers of the samples of some batches from a position on, and the position after them."""
    opened = open_data(source, step.bundle(()).manifest, 3, at)
    found: list[int] = []
    for number in range(count):
        batch = opened.batch(number)
        assert batch is not None
        found += batch.local(0, "cpu")[0][:, 0].int().tolist()
    return found, opened.position


SOURCES: dict[str, Callable[[int], Any]] = {
    "a data set": lambda rows: Numbered(),
    "a loader": lambda rows: loader(rows, shuffle=True),
    "a loader with a generator": lambda rows: loader(rows, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "a loader with workers": lambda rows: loader(rows, shuffle=True, num_workers=2),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("rows", "count", "other"), [(6, 1, 4), (6, 5, 8), (5, 9, 7), (7, 5, 2)])
def test_another_batch_size_continues_after_the_same_samples(name: str, rows: int, count: int, other: int) -> None:
    """An epoch has each sample once, and those that are left out at its end are fewer than a batch."""
    before, at = read(bundle(rows), SOURCES[name](rows), count, DataPosition())
    step = bundle(other)
    rest = (COUNT - at.samples) // other
    after, end = read(step, SOURCES[name](other), rest + 3, at)
    epoch = before[-at.samples :] + after[: rest * other]
    assert max(Counter(epoch).values()) == 1
    assert COUNT - len(epoch) < other
    # The order is that of the epoch, and the next one is whole.
    whole, _ = read(bundle(1), SOURCES[name](1), COUNT * ((at.epoch or 0) + 1), DataPosition())
    assert epoch == whole[-COUNT:][: len(epoch)]
    assert max(Counter(after[rest * other :]).values()) == 1
    assert (end.epoch, end.samples, end.batches) == ((at.epoch or 0) + 1, 3 * other, count + rest + 3)


ITERABLES: dict[str, Callable[[int], Any]] = {
    "batches": batches,
    "a function": lambda rows: lambda: iter(batches(rows)),
    "a stream": lambda rows: DataLoader(Streamed(), batch_size=rows, drop_last=True),
    "a batch sampler": lambda rows: DataLoader(
        Numbered(), batch_sampler=list(BatchSampler(range(COUNT), rows, drop_last=True))
    ),
    "a function of the start": lambda rows: lambda start: batches(rows)[start:],
}


@pytest.mark.parametrize("name", ITERABLES)
def test_batches_of_the_user_continue_where_one_begins(name: str) -> None:
    make = ITERABLES[name]
    before, at = read(bundle(6), make(6), 2, DataPosition())
    after, end = read(bundle(4), make(4), 3, at)
    assert before + after == list(range(24))
    # Saved again after the change, the position is still that of the samples.
    assert read(bundle(4), make(4), 1, end)[0] == list(range(24, 28))
    assert read(bundle(3), make(3), 1, end)[0] == list(range(24, 27))
    with pytest.raises(RunError, match=r"batches of 6|of 6 before the checkpoint"):
        read(bundle(5), make(5), 1, at)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [*SOURCES, "batches", "a function", "a stream", "a batch sampler"])
def test_a_run_continues_after_the_last_batch_of_an_epoch(name: str) -> None:
    make = {**SOURCES, **ITERABLES}[name]
    whole, _ = read(bundle(6), make(6), 15, DataPosition())
    for count in (6, 12):
        before, at = read(bundle(6), make(6), count, DataPosition())
        assert before == whole[: 6 * count]
        for position in (at, DataPosition(count)):
            assert read(bundle(6), make(6), 15 - count, position)[0] == whole[6 * count :]


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch sampler"])
def test_a_generator_of_the_user_decides_the_order_as_in_torch(kind: str) -> None:
    def make(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        if kind == "shuffle":
            return loader(6, shuffle=True, generator=generator)
        sampler = RandomSampler(Numbered(), generator=generator)
        if kind == "sampler":
            return loader(6, sampler=sampler)
        return DataLoader(Numbered(), batch_sampler=BatchSampler(sampler, 6, drop_last=True))

    orders = []
    for seed in (5, 6):
        theirs = make(seed)
        expected = [int(i) for _ in range(3) for x, _ in theirs for i in x[:, 0]]
        ours = make(seed)
        state = ours.generator.get_state() if ours.generator is not None else None
        found, _ = read(bundle(6), ours, 18, DataPosition())
        assert found == expected
        if state is not None:
            assert torch.equal(ours.generator.get_state(), state)
        assert read(bundle(6), make(seed), 8, DataPosition(10))[0] == expected[60:]
        orders.append(found)
    assert orders[0] != orders[1]


def test_steps_of_a_step_and_of_its_bundle_are_counted_from_its_first(tmp_path: Path) -> None:
    """A second call, a bundle that was saved between, and a resume make the steps that one call makes."""
    whole, parts, calls = (perceptron.step("2/1/1/1") for _ in range(3))
    seen = observers.Calls()
    table = data.samples()
    dr.train(whole, table, steps=9, callbacks=[seen], checkpoint=tmp_path / "ck", every=6)
    expected = [result.loss for result in seen.results]
    again = observers.Calls()
    assert dr.train(parts, table, steps=4, callbacks=[again]).step == 4
    path = parts.save(tmp_path / "parts.dist", ("torch",))
    ended = dr.train(parts, table, steps=9, callbacks=[again])
    assert (ended.step, parts.steps, again.calls.count("begun 4")) == (9, 9, 1)
    assert [result.loss for result in again.results] == pytest.approx(expected, rel=1e-6)
    for source, options in ((path, {}), (calls, {"checkpoint": tmp_path / "ck", "resume": "last"})):
        rest = observers.Calls()
        if source is calls:
            (tmp_path / "ck" / "latest").write_text("step-00000006\n")
        dr.train(source, table, steps=9, callbacks=[rest], **options)
        assert [r.loss for r in rest.results] == pytest.approx(expected[-len(rest.results) :], rel=1e-6)
        assert len(rest.results) == (5 if source is path else 3)
        assert rest.results[0].rates == seen.results[-len(rest.results)].rates
    with pytest.warns(UserWarning, match="no step is left: 9 of 9 are done"):
        dr.train(parts, table, steps=9)


def test_the_position_of_the_data_is_in_the_checkpoint(tmp_path: Path) -> None:
    dr.train(bundle(6), Numbered(), steps=8, checkpoint=tmp_path)
    assert latest(tmp_path).position.data == DataPosition(8, 1, 2, 12, 6)
    four = bundle(4)
    dr.train(four, Numbered(), steps=10, checkpoint=tmp_path, resume="last")
    assert latest(tmp_path).position.data == DataPosition(10, 1, 4, 20, 4)
    # Another run of the same step has the position of the last one.
    dr.train(four, Numbered(), steps=11, checkpoint=tmp_path / "other")
    assert latest(tmp_path / "other").position.data == DataPosition(11, 1, 5, 24, 4)


class Fewer(Numbered):
    """The samples without the last one."""

    def __len__(self) -> int:
        return COUNT - 1


def seeded(seed: int) -> DataLoader[Any]:
    return loader(6, shuffle=True, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        (seeded(5), seeded(6), {}, r"\(generator 5\), found others \(generator 6\)"),
        (seeded(5), loader(6, shuffle=True), {}, r"\(generator 5\), found others \(generator none\)"),
        (loader(6, shuffle=True), loader(6), {}, r"with RandomSampler .*, found others .* with SequentialSampler"),
        (loader(6, shuffle=True), loader(6, shuffle=True), {"in_order": True}, "with SequentialSampler"),
        (Numbered(), loader(6, shuffle=True), {}, r"a shuffled data set\), found others \(order a DataLoader"),
        (Numbered(), Fewer(), {}, r"\(samples 37\), found others \(samples 36\)"),
        (loader(6), DataLoader(Fewer(), batch_size=6, drop_last=True), {}, r"\(samples 37\), .* \(samples 36\)"),
    ],
)
def test_data_of_another_order_within_an_epoch_are_refused(
    before: Any, after: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """At the end of an epoch they are not: the next one has no sample of this one."""
    for steps, folder in ((2, tmp_path / "within"), (6, tmp_path / "end"), (12, tmp_path / "second")):
        dr.train(bundle(6), before, steps=steps, checkpoint=folder)
    with pytest.raises(CheckpointError, match=message):
        dr.train(bundle(6), after, steps=4, checkpoint=tmp_path / "within", resume="last", **options)
    # A whole epoch has six batches, and one sample is left out.
    for folder in ("end", "second"):
        dr.train(bundle(6), after, steps=14, checkpoint=tmp_path / folder, resume="auto", **options)
    limit: dict[str, Any] = {"limit_batches": 6} if isinstance(before, DataLoader) else {}
    ended = dr.train(bundle(6), before, steps=5, checkpoint=tmp_path / "within", resume="last", **limit)
    assert ended.data.samples == 30
