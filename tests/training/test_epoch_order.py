"""Order and number of the batches of an epoch, and the best model at the end of a run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers.trainer_pt_utils import get_length_grouped_indices

import distir_relax as dr
from distir_relax.checkpoints import DataPosition
from distir_relax.errors import RunError
from distir_relax.runtime.training.data_loader import LoaderEpochs
from distir_relax.runtime.training.epoch_order import LengthGroups, arrange
from tests.training import data, observers, perceptron

SAMPLES = [{"input_ids": list(range(n % 23 + 1)), "length": torch.tensor(n % 23 + 1)} for n in range(0, 127 * 5, 5)]


def lengths(batch: list[dict[str, Any]]) -> list[int]:
    return [len(sample["input_ids"]) for sample in batch]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_order_is_that_of_transformers(batch_size: int) -> None:
    sizes = [len(sample["input_ids"]) for sample in SAMPLES]
    for seed in range(3):
        torch.manual_seed(seed)
        expected = get_length_grouped_indices(sizes, batch_size)
        torch.manual_seed(seed)
        assert list(LengthGroups(sizes, batch_size)) == expected


def after(epochs: LoaderEpochs, batches: int) -> list[Any]:
    """The batches after a number of them, to the end of the epoch."""
    return list(epochs.begin(DataPosition(batches))[0])


@pytest.mark.parametrize("key", ["input_ids", "length"])
def test_batches_have_samples_of_similar_length(key: str) -> None:
    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True, collate_fn=lengths)  # type: ignore[arg-type]
    grouped = LoaderEpochs(arrange(loader, grouped_by=key), 5, 4)
    epochs = [after(grouped, 0), after(grouped, 32)]
    expected = sorted(len(sample["input_ids"]) for sample in SAMPLES)
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [expected] * 2
    assert epochs[0] != epochs[1]
    padded = sum(max(batch) * len(batch) - sum(batch) for batch in epochs[0])
    assert padded < 0.25 * sum(max(batch) * len(batch) - sum(batch) for batch in after(LoaderEpochs(loader, 5, 4), 0))
    # A run that resumes has the order of the one that was interrupted.
    assert after(LoaderEpochs(arrange(loader, grouped_by=key), 5, 4), 7) == epochs[0][7:]


class Lines(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("source", "limit", "expected"),
    [
        (DataLoader(range(10), batch_size=2), 3, [[0, 1], [2, 3], [4, 5]]),  # type: ignore[arg-type]
        (DataLoader(range(10), batch_size=2), 0.5, [[0, 1], [2, 3]]),  # type: ignore[arg-type]
        (DataLoader(range(10), batch_size=4), 9, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),  # type: ignore[arg-type]
        (DataLoader(range(4), batch_size=None), 2, [[0], [1]]),  # type: ignore[arg-type]
        (DataLoader(Lines(), batch_size=3), 2, [[0, 1, 2], [3, 4, 5]]),
        ([[0], [1], [2]], 2, [[0], [1]]),
    ],
)
def test_first_batches_of_each_epoch(source: Any, limit: float, expected: list[list[int]]) -> None:
    limited = arrange(source, limit)
    for _ in range(2):
        assert [torch.as_tensor(batch).reshape(-1).tolist() for batch in limited] == expected
    if isinstance(limited, DataLoader):
        epochs = LoaderEpochs(limited, 0, limited.batch_size or 1)
        found = [after(epochs, 0), after(epochs, len(expected))]
        assert [[torch.as_tensor(b).reshape(-1).tolist() for b in epoch] for epoch in found] == [expected] * 2


def test_mistakes_are_errors() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    for source, options, message in (
        (loader, {"limit": 0}, "limit of at least one batch, found 0"),
        (loader, {"limit": 0.1}, "limit of at least one batch, found 0.1"),
        (loader, {"grouped_by": "length"}, "expected samples with 'length' or 'input_ids', found tuple"),
        (data.Table(), {"limit": 2}, "expected a DataLoader, .* found Table"),
        (data.batches, {"in_order": True}, "expected a DataLoader, .* found function"),
        (DataLoader(Lines()), {"grouped_by": "length"}, "makes batches of samples by index"),
        (iter([]), {"limit": 0.5}, "a part of data without a length"),
    ):
        with pytest.raises(RunError, match=message):
            arrange(source, **options)  # type: ignore[arg-type]


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    step = perceptron.step("2/1/1/1", evaluates=True)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    errors = iter([0.5, 0.25, 0.75, 0.5])

    def evaluate(done: int) -> dict[str, float]:
        seen[done] = step.parameters()
        return {"error": next(errors)}

    options: dict[str, Any] = {"checkpoint": tmp_path, "evaluate": evaluate, "evaluate_every": 2, "every": 3, "keep": 1}
    ended = dr.train(step, data.batches, steps=8, best="error", load_best=True, **options)
    assert (ended.step, ended.best, step.steps) == (8, 4, 4)
    for name, tensor in step.parameters().items():
        assert torch.equal(tensor, seen[4][name])
        assert not torch.equal(tensor, seen[8][name])
    # The step goes on from there.
    calls = observers.Calls()
    other = perceptron.step("1/1/1/1", evaluates=True)
    dr.train(other, data.batches, steps=6, checkpoint=tmp_path, resume="best", callbacks=[calls])
    assert [step(*data.drawn(4)), step(*data.drawn(5))] == pytest.approx([r.loss for r in calls.results], rel=1e-5)
    with pytest.raises(RunError, match="load_best: expected the metric of the best checkpoint"):
        dr.train(step, data.batches, steps=9, load_best=True)
