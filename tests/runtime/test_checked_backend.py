"""The backend `checked`: the same results, and the op, the place and the rank of the first NaN."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.errors import RunError
from tests.zoo import gpt2, made_once

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Overflows(torch.nn.Module):
    """Its exponentials become infinite for large inputs, and their quotient is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.exp(self.first(x) * 40)
        return self.last(h / h.sum(-1, keepdim=True))


LINE = Overflows.forward.__code__.co_firstlineno


def test_results_are_those_of_the_torch_backend() -> None:
    case = made_once(gpt2)
    plan = dr.compile(case.model, case.args, case.kwargs, strategy="1/3/1/1")
    found = plan(*case.args, **case.kwargs, backend="checked").logits
    assert torch.equal(found, plan(*case.args, **case.kwargs).logits)


@pytest.mark.parametrize(
    ("strategy", "rank", "task"),
    [("1/1/1/1", "", ""), ("3/1/1/1", " (on rank 2 of 3)", ""), ("1/1/2/3", " (on rank 0 of 2)", ", in task 0F2")],
)
def test_the_first_nan_is_named(strategy: str, rank: str, task: str) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, 5), torch.randint(0, 3, (6,))
    options: dict[str, Any] = {"optimizer": dr.optim.SGD(0.1), "example_batch": (x, target), "strategy": strategy}
    model = Overflows()
    step, other = (dr.compile_training(model, F.cross_entropy, **options) for _ in range(2))
    assert step(x, target, backend="checked") == pytest.approx(other(x, target), rel=1e-6)
    large = x.clone()
    large[5] *= 90
    with pytest.raises(RunError) as raised:
        step(large, target, backend="checked")
    place = rf"%div[.\w]* = divide  # test_checked_backend.py:{LINE + 2}"
    text = rf"{place}.*: \d of \d+ elements of a result are NaN{re.escape(task)}{re.escape(rank)}\n"
    assert re.match(text, str(raised.value)), str(raised.value)
    assert "the first infinite value was a result of %exp" in raised.value.hint
    assert f"test_checked_backend.py:{LINE + 1}" in raised.value.hint


def test_inputs_and_weights_are_looked_at_first() -> None:
    model = torch.nn.Linear(5, 3)
    plan = dr.compile(model, (torch.ones(2, 5),), strategy="1/1/1/1")
    x = torch.ones(2, 5)
    x[1, 3] = torch.nan
    with pytest.raises(RunError, match="the input 'input' has a NaN before the step"):
        plan(x, backend="checked")
    step = dr.compile_training(
        model, F.mse_loss, optimizer=dr.optim.SGD(1e38), example_batch=(torch.ones(2, 5) * 1e4, torch.zeros(2, 3))
    )
    step(torch.ones(2, 5) * 1e4, torch.zeros(2, 3), backend="checked")
    with pytest.raises(RunError, match=r"= .*elements of a result are NaN|the weight"):
        step(torch.ones(2, 5) * 1e4, torch.zeros(2, 3), backend="checked")
