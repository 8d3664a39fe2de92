"""Evaluations do not depend on how the data are cut into batches: sums of all of them, and metrics with states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.classification as classification
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.errors import ImportModelError
from tests.training import observers

ROWS = 36
X = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)).double()
T = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(1))
LABELS = T.clone()
LABELS[:11] = LABELS[24:36] = -100
Cuts = list[tuple[torch.Tensor, torch.Tensor]]


def cut(x: torch.Tensor, t: torch.Tensor, *ends: int) -> Cuts:
    return [(x[a:b], t[a:b]) for a, b in zip((0, *ends), (*ends, len(x)), strict=True)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def compiled(metrics: dict[str, Any], strategy: str = "1/1/1/1", loss: Any = F.cross_entropy) -> dr.TrainingStep:
    example = X[12:24], T[12:24]
    return dr.compile_training(
        model(), loss, optimizer=dr.optim.SGD(0.1), example_batch=example, strategy=strategy, metrics=metrics
    )


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).double()


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target != -100).double()
    return (right(output, target) * mask).sum() / mask.sum().clamp(min=1)


def f1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chosen, true = output.argmax(-1) == 1, target == 1
    both = (chosen & true).double().sum()
    precision, recall = both / chosen.double().sum(), both / true.double().sum()
    return 2 * precision * recall / (precision + recall)


def perplexity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target).exp()


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return right(output, target).mean() * len(target), (target != -100).double().sum()


def by_elements(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean().sqrt()


def several(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As the loss of a mixture of experts: a mean over labels, and a product of means over all rows."""
    shares = output.softmax(-1).mean(0)
    return F.cross_entropy(output, target) + 0.1 * (shares * (output > 0).double().mean(0)).sum()


def by_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum() / target.shape[0]


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([0.5, 2.0, 1.0], dtype=output.dtype)
    return F.cross_entropy(output, target, weight, label_smoothing=0.1)


FUNCTIONS = [masked, f1, perplexity, total, by_elements, weighted, rmse, several, by_rows]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1", "1/3/1/1", "2/1/1/3", "1/1/2/2"])
def test_batches_of_any_cut_give_the_numbers_of_one_batch(strategy: str) -> None:
    """With 1, 12, 5 and no labels, of 12, 1 and 23 samples; twice, as totals begin anew."""
    step = compiled({m.__name__: m for m in FUNCTIONS}, strategy)
    with torch.no_grad():
        output = model()(X)
        expected = {"loss": float(F.cross_entropy(output, LABELS))}
        expected |= {m.__name__: float(m(output, LABELS)) for m in FUNCTIONS}
    for batches in (cut(X, LABELS, 12, 24), cut(X, LABELS, 12, 13), cut(X, LABELS)):
        assert step.evaluate(batches) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/2", "1/2/1/1"])
def test_a_pair_is_a_sum_and_a_count(strategy: str) -> None:
    step = compiled({"pair": pair}, strategy)
    with torch.no_grad():
        sums = [pair(model()(x), t) for x, t in cut(X, LABELS, 12, 24)]
    expected = float(sum(s for s, _ in sums) / sum(c for _, c in sums))
    assert step.evaluate(cut(X, LABELS, 12, 24))["pair"] == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_a_sum_is_added_up() -> None:
    step = compiled({}, "3/1/1/1", loss=total)
    with torch.no_grad():
        expected = float(total(model()(X), LABELS))
    assert step.evaluate(cut(X, LABELS, 12, 24))["loss"] == pytest.approx(expected, rel=1e-9)


METRICS: dict[str, Any] = {
    "f1": lambda: classification.MulticlassF1Score(3, average="macro"),
    "accuracy": lambda: classification.MulticlassAccuracy(3),
    "micro": lambda: classification.MulticlassAccuracy(3, average="micro"),
    "jaccard": lambda: classification.MulticlassJaccardIndex(3),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1", "1/3/1/2"])
def test_metrics_of_torchmetrics_are_given_as_objects(strategy: str) -> None:
    ours = {name: make() for name, make in METRICS.items()}
    step = compiled(ours, strategy)
    expected = {name: make() for name, make in METRICS.items()}
    with torch.no_grad():
        for metric in expected.values():
            metric.update(model()(X), T)
    for batches in (cut(X, T, 12, 24), cut(X, T, 5, 6, 30)):
        found = step.evaluate(batches)
        for name, metric in expected.items():
            assert found[name] == pytest.approx(float(metric.compute()), rel=1e-5)
    assert all(metric._update_count == 0 for metric in ours.values())


class Largest(nn.Module):
    """A metric of a user, whose state is a buffer that is not a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(-math.inf, dtype=torch.float64))

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.seen = torch.maximum(self.seen, output.max())

    def compute(self) -> torch.Tensor:
        return self.seen

    def reset(self) -> None:
        self.seen.fill_(-math.inf)


def test_states_of_any_kind_are_of_all_batches_on_ranks_and_in_bundles(tmp_path: Path) -> None:
    step = compiled({"largest": Largest(), "masked": masked}, "3/1/1/1")
    batches = cut(X, LABELS, 24, 29)
    found = step.evaluate(batches)
    with torch.no_grad():
        assert found["largest"] == pytest.approx(float(model()(X).max()), rel=1e-9)
    path = step.save(tmp_path / "step.dist", ("torch",))
    calls = observers.Calls()
    dr.train(path, [(X[12:24], T[12:24])], steps=2, evaluation=batches, evaluate_every=1, callbacks=[calls])
    step(X[12:24], T[12:24])
    assert calls.metrics[1] == pytest.approx(step.evaluate(batches), rel=1e-9)
    step(X[12:24], T[12:24])
    assert calls.metrics[2] == pytest.approx(step.evaluate(batches), rel=1e-9)


def test_metrics_that_cannot_be_in_a_program_are_refused() -> None:
    with pytest.raises(
        ImportModelError, match="expected tensors as the state of MulticlassAUROC, found a list"
    ) as caught:
        compiled({"auroc": classification.MulticlassAUROC(3)}).evaluate(cut(X, T))
    assert caught.value.where == "metrics['auroc']"

    class Empty(Largest):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def reset(self) -> None:
            """There is nothing."""

    with pytest.raises(ImportModelError, match="expected a metric with states, found none in Empty"):
        compiled({"none": Empty()}).evaluate(cut(X, T))
