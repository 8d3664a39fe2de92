"""Steps of training against torch on one process: every family of models, by every strategy, in float64."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError, RunError
from tests.families import FAMILIES


def by_torch(model: nn.Module, batches: list[Any], optimizer: Any, clip: float | None = None) -> list[float]:
    """Train `model`, which gives its loss; the losses."""
    steps, losses = optimizer(model.parameters()), []
    for batch in batches:
        steps.zero_grad()
        loss = model(*batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
        losses.append(loss.item())
    return losses


def agrees(
    model: nn.Module, batches: list[Any], ours: Any, theirs: Any, strategy: str, tolerance: float = 1e-9,
    clip: float | None = None, **options: Any,
) -> dr.TrainingStep:  # fmt: skip
    """Train a copy by torch and a step by us; losses and all parameters are the same."""
    own = deepcopy(model)
    losses = by_torch(own, batches, theirs, clip)
    step = dr.compile_training(
        model, optimizer=ours, example_batch=batches[0], strategy=strategy, clip_norm=clip, **options
    )
    found = [step(batch) for batch in batches]
    torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
    expected = dict(own.named_parameters(remove_duplicate=False))
    parameters = step.parameters()
    assert set(parameters) == {name for name in expected if name in step.plan.imported.names}
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=tolerance, atol=tolerance)
    return step


ADAM = dr.optim.AdamW(lr=3e-3, weight_decay=0.01), lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01)
SGD = dr.optim.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)

CASES = [
    ("gpt2", "3/1/1/2,zero=1", *ADAM),
    ("gpt2", "2/3/1/2,zero=3,checkpoint=block", *ADAM),
    ("gpt2", "1/3/1/2,sequence_parallel,checkpoint=selective", *ADAM),
    ("llama", "2/3/1/1,zero=2", *SGD),
    ("llama", "2/2/1/2,zero=3,sequence_parallel", *ADAM),
    ("llama", "2/2/2/2,zero=2,sequence_parallel", *ADAM),
    ("bert", "3/1/1/2,zero=2", *ADAM),
    ("vit", "2/2/1/3,sequence_parallel", *ADAM),
    ("mixtral", "1/3/1/1", *SGD),
    ("mixtral", "3/1/1/1,experts=data", *SGD),
    ("mixtral", "2/2/1/2,experts=data,zero=1", *ADAM),
    ("resnet", "3/1/1/2", *ADAM),
    ("recurrent", "2/1/1/2", *ADAM),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "strategy", "ours", "theirs"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_family_trains_as_torch_trains_it(name: str, strategy: str, ours: Any, theirs: Any) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    model = family.model.to(torch.float32 if name == "mixtral" else torch.float64).train()
    tolerance = 1e-5 if name == "mixtral" else family.tolerance
    agrees(model, [family.args] * 3, ours, theirs, strategy, tolerance)


def test_a_resnet_is_trained_split_in_space() -> None:
    torch.manual_seed(0)
    family = FAMILIES["resnet"]()
    model = family.model.double().train()
    agrees(model, [family.args] * 3, *ADAM, None, shardings={"x": "S[2]"}, mesh=3)  # type: ignore[arg-type]


class Tied(nn.Module):
    """One weight used at both ends, and a mean over the labels that count: parts of a batch have unequally many."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(31, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(torch.tanh(self.body(self.words(x))), self.words.weight), labels)


def words(rows: int = 5, ignored: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 31, (rows,))
    labels = torch.randint(0, 31, (rows,))
    labels[:ignored] = -100
    return x, labels


@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "3/1/1/2", "2/2/1/1"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_known_traps(strategy: str, clip: float | None) -> None:
    """With plain SGD a wrong factor shows at once, which Adam would divide away.

    A loss off by the number of ranks; a tied weight counted twice; a gradient not reduced over data; gradients clipped
    by the norm of one rank; a mean of means, of ranks or microbatches whose labels count unequally often.
    """
    torch.manual_seed(0)
    batches = [words(5, ignored) for ignored in (3, 0, 4)]
    agrees(Tied().double(), batches, dr.optim.SGD(lr=1.0), lambda p: torch.optim.SGD(p, lr=1.0), strategy, 1e-12, clip)


def test_a_loss_is_torch_code_and_the_rate_a_schedule() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 31), nn.ReLU(), nn.Linear(31, 3)).double()
    x, y = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    own = deepcopy(model)
    steps = torch.optim.SGD(own.parameters(), lr=1.0)
    cosine = dr.lr.Cosine(0.1, steps=4, warmup=1)
    step = dr.compile_training(
        model, F.mse_loss, optimizer=dr.optim.SGD(lr=cosine), example_batch=(x, y), strategy="1/3/1/1", name="small"
    )
    for number in range(4):
        steps.param_groups[0]["lr"] = cosine(number)
        steps.zero_grad()
        loss = F.mse_loss(own(x), y)
        loss.backward()
        steps.step()
        assert step(x, y) == pytest.approx(loss.item(), abs=1e-12)
    for name, tensor in step.parameters().items():
        torch.testing.assert_close(tensor, own.get_parameter(name).detach())
    assert repr(step).startswith("step 4 of small: 3 ranks")
    with pytest.raises(RunError, match="expected"):
        step(x[:4], y)


def test_inputs_may_be_a_dict_and_parameters_frozen(tmp_path: Any) -> None:
    torch.manual_seed(0)
    family = FAMILIES["gpt2"]()
    model = family.model.double().train()
    model.model.transformer.wpe.weight.requires_grad_(False)
    batch = dict(zip(("x", "labels"), family.args, strict=True))
    step = dr.compile_training(model, optimizer=dr.optim.AdamW(lr=1e-2), example_batch=batch, strategy="3/1/1/1")
    losses = [step(batch) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    parameters = step.parameters()
    torch.testing.assert_close(parameters["model.transformer.wpe.weight"], model.model.transformer.wpe.weight.detach())
    loaded = dr.load(step.save(tmp_path / "gpt2.dist", ("torch",)))
    assert len(loaded.bundle.manifest.updates) > 2


def test_bfloat16_computes_and_float32_keeps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 31), nn.ReLU(), nn.Linear(31, 3))
    x, y = torch.randn(5, 7), torch.randn(5, 3)
    wide, narrow = (
        dr.compile_training(
            model, F.mse_loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=(x, y), strategy="3/1/1/1", **how
        )
        for how in ({}, {"precision": "bf16"})
    )
    losses = [(wide(x, y), narrow(x, y)) for _ in range(5)]
    assert all(abs(a - b) < 0.02 * a for a, b in losses)
    assert losses[-1] != losses[0]
    assert {t.dtype for t in narrow.parameters().values()} == {torch.float32}
    dtypes = {v.tensor.dtype for op in narrow.plan.modules["global"].main.ops for v in op.results}
    assert "bfloat16" in dtypes


def test_what_cannot_be_trained() -> None:
    model, x = nn.Linear(7, 3), torch.randn(5, 7)
    with pytest.raises(DistIRError, match="expected a loss that is a number, found"):
        dr.compile_training(model, lambda y, t: y - t, optimizer=dr.optim.SGD(), example_batch=(x, torch.randn(5, 3)))
    with pytest.raises(DistIRError, match=r"expected example_batch=\(inputs, targets\), found Tensor"):
        dr.compile_training(model, F.mse_loss, optimizer=dr.optim.SGD(), example_batch=x)
    with pytest.raises(DistIRError, match="a precision of float32 or bf16 or fp16 or bf16-true for training, found 'i"):
        dr.compile_training(model, F.mse_loss, optimizer=dr.optim.SGD(), example_batch=(x, x), precision="int4")
    with pytest.raises(DistIRError, match="no parameter that requires gradients"):
        dr.compile_training(
            nn.Linear(7, 3).requires_grad_(False),
            F.mse_loss,
            optimizer=dr.optim.SGD(),
            example_batch=(x, torch.randn(5, 3)),
        )
