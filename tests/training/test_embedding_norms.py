"""Embeddings whose rows are bounded when they are looked up (`max_norm`), which torch does in place, before that."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.optimizers import optimize
from distir_relax.proof.model import check_model

WORDS, WIDTH = 11, 6


class Model(nn.Module):
    """Looks up once or `twice`; with `tied` weights the scores are products with the rows, as they are by then."""

    def __init__(self, tied: bool = False, twice: bool = False, order: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied, self.twice = tied, twice
        self.table = nn.Embedding(WORDS, WIDTH, max_norm=1.5, norm_type=order)
        if not tied:
            self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.twice:
            x = x + self.table(labels)
        scores = F.linear(x.tanh(), self.table.weight) if self.tied else self.head(x.tanh())
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(WORDS, (2, 6, 5), generator=generator)) for _ in range(4)]  # type: ignore[misc]


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(model: nn.Module, optimizer: Any, strategy: str, **options: Any) -> dr.TrainingStep:
    return dr.compile_training(model, optimizer=optimizer, example_batch=batches()[0], strategy=strategy, **options)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/2", "1/2/1/1", "3/1/1/1,zero=3"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"twice": True}, {"order": 1.0}], ids=str)
def test_steps_are_torch_s(options: dict[str, Any], strategy: str) -> None:
    """The optimizer updates the bounded rows, by the decay of the parameter's name."""
    model = Model(**options)
    theirs, before = deepcopy(model), deepcopy(model.state_dict())
    table, head = list(theirs.table.parameters()), [p for n, p in theirs.named_parameters() if "head" in n]
    groups = [{"params": table, "weight_decay": 0.0}, *([{"params": head}] if head else [])]
    losses = by_torch(theirs, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3))
    step = compiled(model, dr.optim.AdamW(0.1, weight_decay=0.3, no_decay="table.*"), strategy)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [step(batch) for batch in batches()] == pytest.approx(losses, rel=1e-12)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-12, atol=1e-14)


def test_averages_and_momentum() -> None:
    model = Model()
    theirs = deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(theirs, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(theirs.parameters(), 0.5, momentum=0.9)
    step = compiled(model, dr.optim.SGD(0.5, momentum=0.9), "2/1/1/1", averaging=dr.optim.EMA(0.5))
    for batch in batches():
        optimizer.zero_grad()
        theirs(*batch).backward()
        optimizer.step()
        average.update_parameters(theirs)
        step(batch)
    for name, parameter in average.module.named_parameters():
        torch.testing.assert_close(step.parameters(averaged=True)[name], parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/2/1/1"])
def test_a_look_up_alone(strategy: str) -> None:
    table, ids = nn.Embedding(WORDS, WIDTH, max_norm=0.75), torch.tensor([[1, 1, 3], [0, 10, 3], [2, 2, 2]])
    before = table.weight.detach().clone()
    found = dr.compile(table, (ids,), strategy=strategy)(ids)
    assert torch.equal(table.weight, before)
    torch.testing.assert_close(found, table(ids))


@pytest.mark.parametrize("strategy", ["3/1/1/1,zero=1", "1/2/1/1", "3/1/1/2"])
def test_the_step_is_proved(strategy: str) -> None:
    plan = compiled(Model(), dr.optim.AdamW(0.1), strategy).plan
    assert check_model(plan.imported.module, plan.modules["sharded"]) == []


def test_a_step_that_updates_the_parameter_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize, "_in_place_of", lambda *_: {})
    plan = compiled(Model(), dr.optim.AdamW(0.1), "3/1/1/1").plan
    with pytest.raises(VerificationError, match=r"the new value of 'table\.weight' is not computed from what"):
        check_model(plan.imported.module, plan.modules["sharded"])


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("1/1/2/1", {}, "in a repeated block, a stage of a pipeline, or another dtype"),
        ("1/1/1/1", {"precision": "bf16-true"}, "in a repeated block, a stage of a pipeline, or another dtype"),
    ],
)
def test_what_is_not_supported_is_named(strategy: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DistIRError, match=words) as caught:
        compiled(Model().float(), dr.optim.SGD(0.1), strategy, **options)
    assert caught.value.where.startswith("table")
