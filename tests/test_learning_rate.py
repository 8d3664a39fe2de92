"""Learning rates against torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import distir_relax as dr
from distir_relax.errors import DistIRError


def of_torch(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> list[float]:
    """The rates that a scheduler of torch has an optimizer of rate 0.3 use."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dr.lr.Cosine(0.3, 17, least=0.05), lambda o: lr_scheduler.CosineAnnealingLR(o, 17, 0.05)),
        (dr.lr.Linear(0.3, 17, least=0.06), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 17)),
        (dr.lr.StepDecay(0.3, 5, 0.5), lambda o: lr_scheduler.StepLR(o, 5, 0.5)),
        (dr.lr.MultiStep(0.3, (3, 4, 11), 0.5), lambda o: lr_scheduler.MultiStepLR(o, [3, 4, 11], 0.5)),
        (dr.lr.Exponential(0.3, 0.8), lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        (dr.lr.Polynomial(0.3, 17, power=1.7), lambda o: lr_scheduler.PolynomialLR(o, 17, 1.7)),
        (dr.lr.CosineRestarts(0.3, 5, least=0.05), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 1, 0.05)),
        (dr.lr.CosineRestarts(0.3, 2, 3), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 3)),
        (dr.lr.OneCycle(0.3, 17), lambda o: lr_scheduler.OneCycleLR(o, 0.3, 17, cycle_momentum=False)),
        (
            dr.lr.OneCycle(0.3, 17, 0.6, 5.0, 7.0),
            lambda o: lr_scheduler.OneCycleLR(
                o, 0.3, 17, pct_start=0.6, div_factor=5.0, final_div_factor=7.0, cycle_momentum=False
            ),
        ),
        (
            dr.lr.InverseSqrt(0.3, 4),
            lambda o: lr_scheduler.LambdaLR(o, lambda n: 4**0.5 * min((n + 1) ** -0.5, (n + 1) * 4**-1.5)),
        ),
        (dr.lr.Constant(0.3, warmup=4), lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 3)),
        (
            dr.lr.WarmupStableDecay(0.3, 17, decay=5, warmup=4, least=0.03),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.25, 1.0, 3), lr_scheduler.LinearLR(o, 1.0, 0.1, 5)],
                [12],
            ),
        ),
        (
            dr.lr.Cosine(0.3, 17, warmup=4),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.25, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 13)], [4]
            ),
        ),
    ],
    ids=lambda x: "torch" if "lambda" in repr(x) else str(x),
)
def test_rates_are_torch_s(ours: Callable[[int], float], theirs: Callable[..., lr_scheduler.LRScheduler]) -> None:
    assert [ours(step) for step in range(17)] == pytest.approx(of_torch(theirs, 17))


@pytest.mark.parametrize("options", [{}, {"rise": 0.6, "start": 5.0}])
def test_the_momentum_of_one_cycle_is_torch_s(options: dict[str, float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, 17, pct_start=options.get("rise", 0.3))
    ours, found = dr.lr.OneCycle(0.3, 17, **options).momentum(), []
    for _ in range(17):
        found.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        if len(found) < 17:
            scheduler.step()
    assert [ours(step) for step in range(17)] == pytest.approx(found)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dr.lr.OneCycle(0.1, 9).momentum(0.95, 0.85), "the first not above the second"),
        (lambda: dr.lr.OneCycle(0.1, 9, start=0.0), "start above 0"),
        (lambda: dr.lr.OneCycle(0.1, 1), "steps to be a whole number of at least 2"),
        (lambda: dr.lr.OneCycle(0.1, 9, rise=1.0), "a rise between 0 and 1"),
        (lambda: dr.lr.CosineRestarts(0.1, 0), "period to be a whole number of at least 1"),
        (lambda: dr.lr.InverseSqrt(0.1, 2.5), "warmup to be a whole number"),  # type: ignore[arg-type]
        (lambda: dr.lr.MultiStep(0.1, (3, 0)), "a step of at"),
        (lambda: dr.lr.WarmupStableDecay(0.1, 9, decay=6, warmup=4), "as warm-up and decay have"),
        (lambda: dr.lr.Exponential(0.1, -1.0), "a factor of at least 0"),
    ],
)
def test_schedules_that_are_none(make: Callable[[], object], words: str) -> None:
    with pytest.raises(DistIRError, match=words):
        make()


def test_a_fall_ends_at_the_least_and_stays_there() -> None:
    for schedule in (dr.lr.Cosine(0.3, 17, 4, 0.05), dr.lr.Linear(0.3, 17, 4, 0.05)):
        assert schedule(3) == schedule(4) == 0.3
        assert [schedule(17), schedule(1000)] == pytest.approx([0.05, 0.05])


def halved(step: int) -> float:
    """A rate of a user's, as a number of NumPy or torch may be."""
    return np.float32(0.2) * 0.5**step  # type: ignore[no-any-return]


def test_a_function_of_the_step_is_a_learning_rate(tmp_path: Path) -> None:
    """Its rates are those of a table, also in groups and in a resumed run; a bundle cannot hold it."""

    def step(lr: Any) -> dr.TrainingStep:
        torch.manual_seed(0)
        optimizer = dr.optim.Groups(dr.optim.SGD(lr), {"bias": dr.optim.AdamW(lambda step: 0.1 / (step + 1))})
        return dr.compile_training(
            torch.nn.Linear(5, 3), torch.nn.functional.mse_loss, optimizer=optimizer, strategy="2/1/1/1",
            example_batch=(torch.ones(6, 5), torch.ones(6, 3)),
        )  # fmt: skip

    batches = [(torch.full((6, 5), float(n)), torch.ones(6, 3)) for n in range(6)]
    expected, found = step(dr.lr.Tabulated.of(halved, 6)), step(halved)
    dr.train(expected, batches, steps=6)
    dr.train(step(halved), batches, steps=3, checkpoint=tmp_path)
    dr.train(found, batches, steps=6, checkpoint=tmp_path, resume="last")
    for name, parameter in expected.parameters().items():
        torch.testing.assert_close(found.parameters()[name], parameter, rtol=0, atol=0)
    with pytest.warns(UserWarning, match=r"learning_rate is now Constant\(lr=0.1, warmup=0\), was halved\(\)"):
        dr.train(step(0.1), batches, steps=7, checkpoint=tmp_path, resume="last")
    with pytest.raises(DistIRError, match=r"found Computed\n  hint: record its rates: dr.lr.Tabulated.of"):
        found.save(tmp_path / "m.dist")
    for function, message in ((lambda step: None, "returns the rate of a step, found None"), (lambda step: -1.0, "-1")):
        with pytest.raises(DistIRError, match=message):
            dr.optim.SGD(function)  # type: ignore[arg-type]
    with pytest.raises(DistIRError, match="expected lr to be a number"):
        dr.optim.SGD(torch.optim.SGD)  # type: ignore[arg-type]
