"""Evaluation of training steps: loss and metrics in evaluation mode, with the parameters at present, on ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.errors import BundleError, DistIRError, ImportModelError, RunError
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import Samples, batches_of
from distir_relax.runtime.training.evaluation import evaluate
from distir_relax.runtime.training.executor import Executor
from tests.training import observers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Classifier(nn.Module):
    """Blocks with a batch norm, whose statistics change in training, and with dropout, which is off in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.4)
        self.rest = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.drop(torch.tanh(self.norm(self.first(x)))))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).double().mean()


def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.gather(1, target[:, None]).mean()


def drawn(count: int, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, 5, generator=generator).double(), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


def by_torch(step: dr.TrainingStep, model: nn.Module, batches: Any, averaged: bool = False) -> dict[str, float]:
    """The same by torch, with the parameters and the buffers of the step."""
    state = step.plan.session().state()
    named = {**dict(model.named_buffers()), **step.parameters(averaged=averaged)}
    model.load_state_dict(
        {
            name: state.get(name, value) if name in dict(model.named_buffers()) else value
            for name, value in named.items()
        },
        strict=False,
    )
    model.eval()
    with torch.no_grad():
        rows = [
            {"loss": F.cross_entropy(model(x), t), "accuracy": accuracy(model(x), t), "margin": margin(model(x), t)}
            for x, t in batches
        ]
    return {name: sum(float(row[name]) for row in rows) / len(rows) for name in rows[0]}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=1", "2/2/1/2,zero=3", "5/1/1/1", "1/1/2/3", "2/1/2/2"])
def test_loss_and_metrics(strategy: str) -> None:
    """12 samples, on 5 ranks 3|3|2|2|2; batch norms couple microbatches in training, in evaluation they do not."""
    torch.manual_seed(0)
    model, data = Classifier(), drawn(5)
    step = dr.compile_training(
        model, F.cross_entropy, optimizer=dr.optim.AdamW(0.05), example_batch=data[0], averaging=dr.optim.EMA(0.5),
        metrics={"accuracy": accuracy, "margin": margin}, strategy=strategy, verify=True,
    )  # fmt: skip
    modes = [module.training for module in model.modules()]
    for number, batch in enumerate(data):
        step(*batch)
        if number in (0, 4):
            for averaged in (False, True):
                found = step.evaluate(data[:3], averaged=averaged)
                assert found == pytest.approx(by_torch(step, copy.deepcopy(model), data[:3], averaged), rel=1e-10)
    assert [module.training for module in model.modules()] == modes
    step(*data[0])


@pytest.mark.parametrize("end", [(nn.ReLU(),), ()])
def test_a_stage_without_weights(end: tuple[nn.Module, ...]) -> None:
    """The last stage of the step has the loss alone: in the evaluation it has the last ops."""
    torch.manual_seed(0)
    x, t = drawn(1)[0]
    model = nn.Sequential(nn.Linear(x.shape[1], 40), nn.ReLU(), nn.Linear(40, 3), *end).double()
    step = dr.compile_training(
        model, F.cross_entropy, optimizer=dr.optim.SGD(0.1), example_batch=(x, t), metrics={}, strategy="1/1/2/3"
    )
    with torch.no_grad():
        expected = float(F.cross_entropy(model(x), t))
    assert step.evaluate([(x, t)])["loss"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["3/1/1/1,zero=1", "1/3/1/1", "3/1/1/2", "1/1/2/3"])
def test_every_sample_is_evaluated(strategy: str) -> None:
    """Batches of 12 and a smaller last one, of a single sample too, which one of 3 ranks has; or fewer than a batch."""
    torch.manual_seed(0)
    model = Classifier()
    metrics = {"accuracy": accuracy, "margin": margin}
    step = dr.compile_training(
        model,
        F.cross_entropy,
        optimizer=dr.optim.SGD(0.1),
        example_batch=drawn(1)[0],
        strategy=strategy,
        metrics=metrics,
    )
    for done, count in enumerate((31, 25, 8), 1):
        x, t = (torch.cat(tensors)[:count] for tensors in zip(*drawn(3), strict=True))
        calls = observers.Calls()
        dr.train(step, drawn(1), steps=done, callbacks=[calls], evaluation=TensorDataset(x, t))
        expected = by_torch(step, copy.deepcopy(model), [(x, t)])
        assert step.steps == done
        assert calls.metrics[done] == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert step.evaluate([(x, t)]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


class Placed(Classifier):
    """A model of 12 samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.linspace(0, 1, 12, dtype=x.dtype)[:, None])


def test_a_model_of_one_batch_size_evaluates_whole_batches() -> None:
    torch.manual_seed(0)
    model = Placed()
    step = dr.compile_training(
        model, F.cross_entropy, optimizer=dr.optim.SGD(0.1), example_batch=drawn(1)[0], strategy="3/1/1/1", metrics={}
    )
    x, t = (torch.cat(tensors)[:31] for tensors in zip(*drawn(3), strict=True))
    calls = observers.Calls()
    with pytest.warns(UserWarning, match="7 of 31 samples are not evaluated"):
        dr.train(step, drawn(1), steps=1, callbacks=[calls], evaluation=TensorDataset(x, t))
    expected = by_torch(step, copy.deepcopy(model), [(x[:12], t[:12]), (x[12:24], t[12:24])])
    assert calls.metrics[1] == pytest.approx({"loss": expected["loss"]}, rel=1e-12)


def test_a_model_that_returns_its_loss_and_frozen_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.frozen(self.inner(x))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = Own()
    data = [{"x": x.float(), "labels": t} for x, t in drawn(3)]
    step = dr.compile_training(
        model, optimizer=dr.optim.SGD(0.5), example_batch=data[0], strategy="3/1/1/1",
        metrics={"accuracy": lambda output, inputs: (output["logits"].argmax(-1) == inputs["labels"]).float().mean()},
    )  # fmt: skip
    for batch in data:
        step(batch)
    found = step.evaluate(data)
    model.load_state_dict(step.parameters())
    with torch.no_grad():
        outputs = [model(**batch) for batch in data]
    assert found["loss"] == pytest.approx(sum(float(o["loss"]) for o in outputs) / 3, rel=1e-5)
    right = [(o["logits"].argmax(-1) == batch["labels"]).float().mean() for o, batch in zip(outputs, data, strict=True)]
    assert found["accuracy"] == pytest.approx(float(sum(right)) / 3, rel=1e-6)


def test_bfloat16_with_masters_in_float32() -> None:
    torch.manual_seed(0)
    model, data = Classifier().float(), [(x.float(), t) for x, t in drawn(3)]
    step = dr.compile_training(
        model,
        F.cross_entropy,
        optimizer=dr.optim.AdamW(0.05),
        example_batch=data[0],
        precision="bf16",
        strategy="2/1/1/1",
    )
    for batch in data:
        step(*batch)
    found = step.evaluate(data)
    assert list(found) == ["loss"]
    narrow = copy.deepcopy(model)
    narrow.load_state_dict(
        {**step.parameters(), **{n: b for n, b in step.plan.session().state().items() if "running" in n}}, strict=False
    )
    narrow = narrow.to(torch.bfloat16).eval()
    with torch.no_grad():
        expected = sum(float(F.cross_entropy(narrow(x.bfloat16()), t)) for x, t in data) / 3
    assert found["loss"] == pytest.approx(expected, rel=0.02)


def test_what_cannot_be_evaluated() -> None:
    data = drawn(1)
    options: dict[str, Any] = {"optimizer": dr.optim.SGD(), "example_batch": data[0]}
    step = dr.compile_training(Classifier(), F.cross_entropy, **options)
    with pytest.raises(RunError, match="expected batches to evaluate"):
        step.evaluate([])
    with pytest.raises(RunError, match="keeps no averages"):
        step.evaluate(data, averaged=True)
    step = dr.compile_training(Classifier(), F.cross_entropy, metrics={"rows": lambda o, t: o.argmax(-1)}, **options)
    with pytest.raises(ImportModelError, match="expected a scalar for 'rows'"):
        step.evaluate(data)
    step = dr.compile_training(Classifier(), F.cross_entropy, metrics={"loss": accuracy}, **options)
    with pytest.raises(DistIRError, match="metrics of other names than 'loss'"):
        step.evaluate(data)


def test_a_bundle_has_the_evaluation_of_its_step(tmp_path: Path) -> None:
    """Weights are in it once; batches from an iterable, and from a data set."""
    torch.manual_seed(0)
    data = drawn(3)
    step = dr.compile_training(
        Classifier(), F.cross_entropy, optimizer=dr.optim.AdamW(0.05), example_batch=data[0], strategy="2/2/1/2,zero=3",
        metrics={"accuracy": accuracy},
    )  # fmt: skip
    for batch in data:
        step(*batch)
    bundle = read_bundle(step.save(tmp_path / "step.dist", backends=("torch",)))
    assert bundle.manifest.training is not None
    assert bundle.manifest.training.evaluated == ("loss", "accuracy")
    assert bundle.evaluation is not None
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step.dist").rglob("weights.safetensors"))]
    assert sizes[0] < sizes[1] / 9
    executor = Executor(Session(bundle))
    expected = step.evaluate(data)
    assert evaluate(executor, lambda: batches_of(bundle.evaluation.manifest, data)) == pytest.approx(expected)
    rows = [(x, t) for batch in data for x, t in zip(*batch, strict=True)]
    samples = Samples(bundle.evaluation.manifest, rows, None)
    for _ in range(2):
        assert evaluate(executor, samples.epoch) == pytest.approx(expected)
    with pytest.raises(RunError, match="the step keeps no averages"):
        evaluate(executor, samples.epoch, averaged=True)
    executor.step(Samples(bundle.manifest, rows, 3).batch(0), ("output",))
    assert evaluate(executor, samples.epoch)["loss"] != pytest.approx(expected["loss"])
    with pytest.raises(RunError, match="expected batches to evaluate"):
        evaluate(executor, lambda: iter(()))
    without = dr.compile_training(Classifier(), F.cross_entropy, optimizer=dr.optim.SGD(), example_batch=data[0])
    with pytest.raises(RunError, match="the bundle has no evaluation"):
        evaluate(Executor(Session(without.bundle(("torch",)))), samples.epoch)


def test_an_evaluation_that_does_not_fit_is_refused() -> None:
    data = drawn(1)
    options: dict[str, Any] = {"optimizer": dr.optim.SGD(), "example_batch": data[0], "metrics": {}}
    one, two = (
        dr.compile_training(Classifier(), F.cross_entropy, strategy=s, **options).bundle(("torch",))
        for s in ("2/1/1/1", "1/2/1/1")
    )
    assert two.evaluation is not None
    with pytest.raises(BundleError, match=r"expected the weight first\.weight as"):
        one.with_evaluation(two.evaluation, ("loss",))
    with pytest.raises(BundleError, match="with the outputs other"):
        two.with_evaluation(two.evaluation, ("other",))
    with pytest.raises(BundleError, match="expected an evaluation if the manifest names one"):
        replace(two, evaluation=None)
