"""Dynamic loss scaling against `torch.amp.GradScaler` on one process, and training in float16."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError
from tests.training import observers

ROWS = 13
Losses = list[float]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 127), nn.Tanh(), nn.LayerNorm(127), nn.Linear(127, 9), nn.GELU(), nn.Linear(9, 3))


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(ROWS, n, generator=generator) for n in (5, 3)) for _ in range(count)]


def by_torch(
    items: list[Any], optimizer: Any, options: dr.optim.LossScale, half: bool = False, clip: float | None = None
) -> tuple[nn.Module, Losses, list[tuple[float, int]]]:
    """The model, losses, and the scales with their counts of good steps, by `GradScaler`; half: computed in float16."""
    trained = model()
    steps = optimizer(trained.parameters())
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=options.init, growth_factor=options.growth, backoff_factor=options.backoff,
        growth_interval=options.interval,
    )  # fmt: skip
    losses, scales = [], []
    for x, y in items:
        steps.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = F.mse_loss(trained(x), y)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), clip)
        scaler.step(steps)
        scaler.update()
        losses.append(loss.item())
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return trained, losses, scales


def scale_of(step: dr.TrainingStep) -> tuple[float, int]:
    state = step.plan.session().state()
    return float(state["loss_scale"]), int(state["loss_scale.good_steps"])


OPTIMIZERS = {
    "adamw": (dr.optim.AdamW(0.01, no_decay="*.bias"), lambda p: torch.optim.AdamW(decayed(p), lr=0.01)),
    "sgd": (dr.optim.SGD(1e-3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    "adagrad": (dr.optim.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


def decayed(parameters: Any) -> Any:
    """Groups in which biases and the norm's bias do not decay."""
    named = list(parameters)
    no = [p for p, (name, _) in zip(named, model().named_parameters(), strict=True) if name.endswith(".bias")]
    return [{"params": [p for p in named if all(p is not n for n in no)]}, {"params": no, "weight_decay": 0.0}]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "name", "clip"),
    [
        ("1/1/1/1", "adamw", None), ("3/1/1/2,zero=3", "adamw", 0.5), ("1/3/1/1", "adagrad", 0.5),
        ("2/1/3/2", "sgd", None),
    ],
)  # fmt: skip
def test_scales_are_those_of_torch_step_by_step(strategy: str, name: str, clip: float | None) -> None:
    """In float32, whose gradients overflow with a scale of 2 ** 127: skipped steps, then growth, then skipped again."""
    ours, theirs = OPTIMIZERS[name]
    options = dr.optim.LossScale(init=2.0**127, growth=16.0, backoff=0.25, interval=3)
    items = [(x, 64 * y) for x, y in batches(14)]
    trained, losses, scales = by_torch(items, theirs, options, clip=clip)
    step = dr.compile_training(
        model(), F.mse_loss, optimizer=ours, example_batch=items[0], strategy=strategy, clip_norm=clip,
        loss_scale=options, averaging=dr.optim.EMA(0.5),
    )  # fmt: skip
    assert scale_of(step) == (2.0**127, 0)
    found, counts = [], []
    for x, y in items:
        before = step.parameters()
        found.append(step(x, y))
        counts.append(scale_of(step))
        state, after = step.plan.session().state(), step.parameters()
        skipped = counts[-1][1] == 0 and counts[-1][0] < ([2.0**127, *(c[0] for c in counts)])[-2]
        assert all(torch.equal(before[n], after[n]) for n in before) == skipped
        assert all(torch.isfinite(value).all() for value in state.values())
    assert counts == scales
    falls = sum(b < a for (a, _), (b, _) in itertools.pairwise([(2.0**127, 0), *scales]))
    assert falls >= 2
    assert any(b > a for (a, _), (b, _) in itertools.pairwise(scales))
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.parameters(), dict(trained.named_parameters()), rtol=1e-3, atol=1e-4)
    if name == "adamw":
        assert int(state["optimizer.step"]) == len(items) - falls


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "init"), [("1/1/1/1", 2.0**24), ("3/1/1/1,zero=2", 2.0**16), ("1/2/2/2", 2.0**16)]
)
def test_float16_computes_and_float32_keeps(strategy: str, init: float) -> None:
    """A scale is too large for float16, but not the one of the loss, which is float32.

    Ranks and microbatches add up gradients in float32, which then does not overflow: theirs is a scale that fits.
    """
    ours, theirs = OPTIMIZERS["adamw"]
    items = batches(8)
    options = dr.optim.LossScale(init, interval=9)
    trained, losses, scales = by_torch(items, theirs, options, half=True)
    step = dr.compile_training(
        model(), F.mse_loss, optimizer=ours, example_batch=items[0], strategy=strategy, precision="fp16",
        loss_scale=options, metrics={"error": lambda output, target: (output - target).abs().mean()},
    )  # fmt: skip
    found, counts = [], []
    for x, y in items:
        found.append(step(x, y))
        counts.append(scale_of(step))
    assert counts == scales
    assert (min(scales) < (init, 0)) == (init > 2.0**20)
    torch.testing.assert_close(found, losses, rtol=3e-3, atol=1e-3)
    parameters = step.parameters()
    assert all(value.dtype == torch.float32 for value in parameters.values())
    torch.testing.assert_close(parameters, dict(trained.named_parameters()), rtol=0.02, atol=0.03)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        error = sum(float((trained(x) - y).abs().mean()) for x, y in items) / len(items)
    assert step.evaluate(items)["error"] == pytest.approx(error, rel=5e-3)


def test_a_run_continues_its_scale(tmp_path: Path) -> None:
    """Of `precision="fp16"` it begins with 2 ** 16; another number of ranks continues from a checkpoint."""
    items = batches(6)

    def compiled(strategy: str) -> dr.TrainingStep:
        options: dict[str, Any] = {"optimizer": dr.optim.AdamW(0.01), "example_batch": items[0], "precision": "fp16"}
        return dr.compile_training(model(), F.mse_loss, strategy=strategy, **options)

    whole, first, second = compiled("1/1/1/1"), compiled("1/1/1/1"), compiled("3/1/1/1,zero=1")
    assert scale_of(whole) == (2.0**16, 0)
    calls = observers.Calls()
    dr.train(whole, items, steps=6)
    dr.train(first, items, steps=4, checkpoint=tmp_path)
    assert dr.train(first.save(tmp_path / "m.dist"), items, steps=5).step == 5
    dr.train(second, items, steps=6, checkpoint=tmp_path, resume="last", callbacks=[calls])
    assert scale_of(second) == scale_of(whole) == (2.0**16, 6)
    torch.testing.assert_close(second.parameters(), whole.parameters(), rtol=0.02, atol=5e-3)


def test_numbers_out_of_range_are_refused() -> None:
    for options, message in (
        ({"init": 0}, "init of more than 0"), ({"growth": 0.5}, "growth of at least 1"), ({"backoff": 1.0}, "below 1"),
        ({"interval": 0}, "interval of at least 1"),
    ):  # fmt: skip
        with pytest.raises(DistIRError, match=message):
            dr.optim.LossScale(**options)
