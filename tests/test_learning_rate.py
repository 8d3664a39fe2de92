"""Learning rates against torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

import distir_relax as dr


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
        (dr.Cosine(0.3, 17, least=0.05), lambda o: lr_scheduler.CosineAnnealingLR(o, 17, 0.05)),
        (dr.Linear(0.3, 17, least=0.06), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 17)),
        (dr.StepDecay(0.3, 5, 0.5), lambda o: lr_scheduler.StepLR(o, 5, 0.5)),
        (
            dr.Cosine(0.3, 17, warmup=4),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.25, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 13)], [4]
            ),
        ),
    ],
    ids=lambda x: "torch" if "lambda" in repr(x) else str(x),
)
def test_rates_are_torch_s(ours: Callable[[int], float], theirs: Callable[..., lr_scheduler.LRScheduler]) -> None:
    assert [ours(step) for step in range(17)] == pytest.approx(of_torch(theirs, 17))


def test_a_fall_ends_at_the_least_and_stays_there() -> None:
    for schedule in (dr.Cosine(0.3, 17, 4, 0.05), dr.Linear(0.3, 17, 4, 0.05)):
        assert schedule(3) == schedule(4) == 0.3
        assert [schedule(17), schedule(1000)] == pytest.approx([0.05, 0.05])
