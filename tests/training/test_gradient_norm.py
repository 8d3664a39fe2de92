"""The norm of all gradients in the results of steps, against `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.bundle import read_bundle
from tests.training import observers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 127), nn.Tanh(), nn.Linear(127, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(13, n, generator=generator).double() for n in (5, 3)) for _ in range(count)]


def by_torch(clip: float) -> tuple[list[float], nn.Module]:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(trained(x), y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.parameters(), clip)))
        optimizer.step()
    return norms, trained


@pytest.mark.parametrize(
    ("strategy", "clip"), [("3/1/1/2,zero=3", 0.25), ("1/3/1/1", None), ("2/1/3/2", 0.25), ("5/1/1/1,zero=1", None)]
)
def test_norms_are_those_of_torch(strategy: str, clip: float | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_norm": True} if clip is None else {"clip_norm": clip}
    step = dr.compile_training(
        model(), F.mse_loss, optimizer=dr.optim.AdamW(0.05), example_batch=batches()[0], strategy=strategy, **options
    )
    assert step.gradient_norm is None
    calls = observers.Calls()
    log = tmp_path / "run.csv"
    dr.train(step, batches(), steps=3, callbacks=[calls, dr.callbacks.logger(str(log))])
    step(*batches()[3])
    norms, trained = by_torch(math.inf if clip is None else clip)
    assert clip is None or min(norms) > clip
    found = [result.gradient_norm for result in calls.results]
    torch.testing.assert_close([*found, step.gradient_norm], norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(step.parameters(), dict(trained.named_parameters()), rtol=1e-9, atol=1e-9)
    logged = [float(row["gradient_norm"]) for row in csv.DictReader(log.open())]
    assert logged == found


def test_a_step_without_it_has_no_part_of_it(tmp_path: Path) -> None:
    """Neither an output nor a collective; clipping has the same collectives as measuring."""

    def collectives(**options: Any) -> tuple[list[str], dr.TrainingStep]:
        step = dr.compile_training(
            model(), F.mse_loss, optimizer=dr.optim.SGD(0.1), example_batch=batches()[0], strategy="3/1/1/1", overlap=0,
            **options,
        )  # fmt: skip
        return [op.name for op in step.plan.modules["distributed"].main.ops if "reduce" in op.name], step

    without, step = collectives()
    measured, other = collectives(gradient_norm=True)
    assert collectives(clip_norm=1.0)[0] == measured
    assert set(without) == {"all_reduce"}
    step(*batches()[0])
    assert step.gradient_norm is None
    for compiled, name in ((step, None), (other, "gradient_norm")):
        training = read_bundle(compiled.save(tmp_path / "m.dist", backends=("torch",))).manifest.training
        assert training is not None
        assert training.gradient_norm == name
    calls = observers.Calls()
    dr.train(step, batches(), steps=2, callbacks=[calls])
    assert calls.results[0].gradient_norm is None
