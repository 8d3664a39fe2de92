"""Losses on ranks: values and gradients of what they are taken of, split by rows, by classes and by both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_differentiate import differentiated, run, with_gradients
from torch import nn

import distir_relax as dr
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.runtime.execute import run_bundle

WEIGHTS = torch.linspace(0.5, 2.5, 11, dtype=torch.float64)


class Classifier(nn.Module):
    """A product and the loss of what it gives, as language models have it: labels are those of the next rows."""

    def __init__(self, loss: Callable[..., torch.Tensor], classes: int = 11) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)
        self.loss = loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), target)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers' `ForCausalLMLoss` has it."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).double(), labels.view(-1), ignore_index=-100)


def of_maps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, WEIGHTS, label_smoothing=0.2, ignore_index=2)


def of_shares(logits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), shares.flatten(0, 1), WEIGHTS, label_smoothing=0.1)


def of_log_softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), reduction="sum")


def of_differences(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kinds = F.smooth_l1_loss(x, y, beta=0.7), F.huber_loss(x, y, delta=0.4), F.l1_loss(x, y), F.mse_loss(x, y)
    kinds += F.soft_margin_loss(x, y), F.margin_ranking_loss(x, y, y, 0.3), F.poisson_nll_loss(x, y.abs(), full=True)
    shares, logs = torch.sigmoid(x), F.logsigmoid(x)
    divergence = F.kl_div(logs, y.abs(), reduction="sum") + F.kl_div(logs, y, reduction="sum", log_target=True)
    return sum(kinds) + divergence + F.binary_cross_entropy(shares, torch.sigmoid(y))


LABELS = torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(0))
IGNORED = LABELS.where(LABELS % 3 > 0, -100)
NUMBERS = torch.randn(5, 4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROWS, CLASSES = {"x": "S[0]", "target": "S[0]"}, {"head.weight": "S[0]"}
BOTH = {"x": "S[0], R", "target": "S[0], R", "head.weight": "R, S[0]"}


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("mesh", "shardings"), [(3, ROWS), (5, CLASSES), ((2, 3), BOTH)], ids=["rows", "classes", "both"]
)
@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (shifted, IGNORED), (of_maps, LABELS), (of_shares, NUMBERS.softmax(-1)), (of_log_softmax, LABELS),
        (of_differences, NUMBERS),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_a_loss_on_ranks_is_torch_s(loss: Any, target: torch.Tensor, mesh: Any, shardings: dict[str, str]) -> None:
    found, model, expected = on_ranks(loss, target, mesh, shardings)
    torch.testing.assert_close(found["output"], expected, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"{name}.grad"], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh", [3, 7])
def test_ranks_without_rows_or_classes_count_for_nothing(mesh: int) -> None:
    for shardings in (ROWS, CLASSES):
        found, model, expected = on_ranks(shifted, IGNORED[:2], mesh, shardings, classes=5)
        torch.testing.assert_close(found["output"], expected)
        torch.testing.assert_close(found["head.weight.grad"], model.head.weight.grad)


def test_the_mean_of_no_labels_is_no_number() -> None:
    found, _, expected = on_ranks(shifted, torch.full((5, 4), -100), 3, ROWS)
    assert expected.isnan()
    assert found["output"].isnan()


def test_logits_are_not_gathered_where_their_classes_are_split() -> None:
    model = Classifier(shifted).double()
    args = NUMBERS[..., :3], IGNORED
    plan = dr.compile(model, args, shardings=CLASSES, mesh=3, passes=with_gradients)
    sent = [op for f in plan.modules["distributed"].functions for op in f.ops if op.name.startswith("all_")]
    assert {op.name for op in sent} == {"all_reduce"}
    assert max(v.placed.local(0).bytes for op in sent for v in op.operands) <= 5 * 4 * 3 * 8, (
        "more than three numbers a row"
    )


class Stopped(nn.Module):
    """What is detached, or computed without gradients, is a number to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.exp(self.a * x)
        y = self.b * x
        return (self.a * scale * y.detach() + torch.sin(y)).sum()


def test_gradients_stop_where_the_model_says_so() -> None:
    model, x = Stopped(), torch.randn(5)
    imported, module = differentiated(model, (x,))
    found = run(imported, module, x)
    model(x).backward()
    torch.testing.assert_close(found["a.grad"], model.a.grad)
    torch.testing.assert_close(found["b.grad"], model.b.grad)


class Rounded(torch.autograd.Function):
    """A step with the gradient of a line."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


rounded = Rounded.apply


class StraightThrough(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.weight = own, nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * x
        y = rounded(y) if self.own else y + (y.round() - y).detach()
        return (y * x).sum()


@pytest.mark.parametrize("own", [True, False])
def test_straight_through_estimators(own: bool) -> None:
    x = torch.randn(5)
    model = StraightThrough(own)
    # What is not trained is read as it computes.
    import_torch(model, (x,), check=True)
    imported, module = differentiated(model, (x,), training=True)
    model(x).backward()
    torch.testing.assert_close(run(imported, module, x)["weight.grad"], model.weight.grad)


def on_ranks(
    loss: Any, target: torch.Tensor, mesh: Any, shardings: dict[str, str], classes: int = 11
) -> tuple[dict[str, torch.Tensor], Classifier, torch.Tensor]:
    """What ranks give, the model with torch's gradients, and torch's loss."""
    torch.manual_seed(0)
    model = Classifier(loss, classes).double()
    if classes < 11:
        target = target.clamp(max=classes - 1)
    args = NUMBERS[: len(target), :, :3], target
    plan = dr.compile(model, args, shardings=shardings, mesh=mesh, passes=with_gradients)
    found = run_bundle(plan.bundle(("torch",)), plan.imported.flatten(args, {}))
    expected = model(*args)
    expected.backward()
    return found, model, expected.detach()
