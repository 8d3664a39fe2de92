"""Averages of a model's own weights that its forward updates (BYOL, MoCo, targets of DQN), against torch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError
from tests.training.test_steps_of_training import by_torch


class Pair(nn.Module):
    """A student, and a teacher whose weights follow the student's; the model returns its loss."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.student, self.head = nn.Sequential(nn.Linear(5, 127), nn.Tanh(), nn.Linear(127, 6)), nn.Linear(6, 6)
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        if style == "buffers":
            weights = dict(self.teacher.named_parameters())
            for name in weights:
                owner, _, label = name.rpartition(".")
                layer = self.teacher.get_submodule(owner)
                delattr(layer, label)
                layer.register_buffer(label, weights[name].detach())

    def follow(self) -> None:
        for name, weight in self.student.named_parameters():
            owner, _, label = name.rpartition(".")
            average = getattr(self.teacher.get_submodule(owner), label)
            if self.style == "copy":
                average.copy_(torch.lerp(average, weight, 0.25))
            elif self.style == "data":
                average.data = average.data * 0.75 + weight.data * 0.25
            elif self.style == "views of data":
                average.data.mul_(0.75).add_(weight.data, alpha=0.25)
            elif self.style == "foreach":
                torch._foreach_lerp_([average], [weight], 0.25)
            else:
                average.mul_(0.75).add_(weight, alpha=0.25)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.follow()
            targets = self.teacher(y)
        self.calls.add_(1)
        return F.mse_loss(self.head(self.student(x)), targets) + self.head(self.student(y)).square().mean()


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(12, 5, generator=generator).double() for _ in range(2)) for _ in range(count)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "strategy", ["1/1/1/1", "3/1/1/1,zero=1", "1/3/1/1", "2/1/1/1,zero=3", "1/2/1/1,checkpoint=block", "2/2/1/1"]
)
@pytest.mark.parametrize("style", ["parameters", "copy", "buffers", "data", "views of data", "foreach"])
def test_teacher_equals_torch(style: str, strategy: str) -> None:
    torch.manual_seed(0)
    model = Pair(style).double()
    own, data = deepcopy(model), batches()
    losses = by_torch(own, data, lambda p: torch.optim.AdamW([w for w in p if w.requires_grad], 0.01))
    step = dr.compile_training(
        model, optimizer=dr.optim.AdamW(0.01, weight_decay=0.01), example_batch=data[0], strategy=strategy, metrics={}
    )
    assert [step(batch) for batch in data] == pytest.approx(losses, rel=1e-9)
    assert step.parameters().keys() == dict(own.named_parameters()).keys()
    step.copy_to_model(model)
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-10)
    step.bundle(("torch",))
    # An evaluation updates nothing: each batch sees the state of the training.
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    expected = []
    for batch in data[:2]:
        own.load_state_dict(before)
        expected.append(own.eval()(*batch).item())
    assert step.evaluate(data[:2])["loss"] == pytest.approx(sum(expected) / 2, rel=1e-9)
    step.copy_to_model(model)
    for name, tensor in before.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("style", ["parameters", "buffers"])
def test_teacher_resumes_on_other_ranks(style: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, models = batches(4), [Pair(style).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    losses = by_torch(deepcopy(models[0]), data, lambda p: torch.optim.SGD([w for w in p if w.requires_grad], 0.1))
    first, second = (
        dr.compile_training(model, optimizer=dr.optim.SGD(0.1), example_batch=data[0], strategy=strategy, metrics={})
        for model, strategy in zip(models, ("3/1/1/1", "1/2/1/1"), strict=True)
    )
    options = {"checkpoint": tmp_path, "evaluation": data[:1], "evaluate_every": 1}
    assert dr.train(first, data, steps=2, **options).loss == pytest.approx(losses[1], rel=1e-9)
    assert dr.train(second, data, steps=4, resume="last", **options).loss == pytest.approx(losses[3], rel=1e-9)
    first.load_parameters(second.parameters(), strict=False)
    for name, tensor in second.parameters().items():
        assert torch.equal(first.parameters()[name], tensor), name


class Queue(nn.Module):
    """He et al., Momentum Contrast, 2020, as its authors wrote it, without the shuffle: a queue of earlier keys."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.keys = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 24), dim=0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for key, query in zip(self.keys.parameters(), self.encoder.parameters(), strict=True):
                key.data = key.data * 0.75 + query.data * 0.25
            k = F.normalize(self.keys(y), dim=1)
        same = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        others = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        self.queue[:, : len(k)] = k.T
        return F.cross_entropy(torch.cat([same, others], 1) / 0.7, torch.zeros(len(q), dtype=torch.long))


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1", "1/2/1/1", "2/1/1/1,zero=3"])
def test_queue_of_earlier_keys_equals_torch(strategy: str) -> None:
    torch.manual_seed(0)
    model = Queue().double()
    own, data = deepcopy(model), batches()
    losses = by_torch(own, data, lambda p: torch.optim.SGD([w for w in p if w.requires_grad], 0.1, momentum=0.9))
    optimizer = dr.optim.SGD(0.1, momentum=0.9)
    step = dr.compile_training(model, optimizer=optimizer, example_batch=data[0], strategy=strategy)
    assert [step(batch) for batch in data] == pytest.approx(losses, rel=1e-9)
    step.copy_to_model(model)
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-10)


VIEWS = {
    "detached": lambda x: x.clone().detach(),
    "cloned last": lambda x: x.detach().clone(),
    "transposed": lambda x: x.clone()[None].T[:, 0],
    "viewed": lambda x: x.clone().view(1, 4),
    "of a transpose": lambda x: x[None].T.clone()[:, 0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_copy_of_a_buffer_is_of_before_its_update(view: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.register_buffer("scale", torch.randn(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = self.linear(x) * VIEWS[view](self.scale)
            self.scale.mul_(0.5)
            return found.square().mean() + y.mean()

    torch.manual_seed(0)
    model = Scaled().double()
    own, data = deepcopy(model), batches()
    losses = by_torch(own, data, lambda p: torch.optim.SGD(p, 0.1))
    step = dr.compile_training(model, optimizer=dr.optim.SGD(0.1), example_batch=data[0], strategy="1/2/1/1")
    assert [step(batch) for batch in data] == pytest.approx(losses, rel=1e-9)


def test_change_of_a_trained_parameter_is_refused() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return self.linear(x).square().mean()

    with pytest.raises(ImportModelError, match=r"changes 'linear\.weight', a parameter that requires gradients"):
        dr.compile_training(Clamped(), optimizer=dr.optim.SGD(0.1), example_batch=(torch.ones(3, 5),))
