"""Optimizers written for torch, traced and trained on ranks, against themselves in one process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.errors import DistIRError
from distir_relax.runtime.session import Session


class Base(torch.optim.Optimizer):
    """The loop of an optimizer; subclasses update one parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class SignedMomentum(Base):
    """It writes to `data`, and counts steps that it does not use. Only matrices decay."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["average"], state["steps"] = torch.zeros_like(p), 0
        state["steps"] += 1
        if p.dim() > 1:
            p.data.mul_(1 - group["lr"] * group["weight_decay"])
        direction = (state["average"] * 0.9 + grad * 0.1).sign_()
        p.add_(direction, alpha=-group["lr"])
        state["average"].mul_(0.95).add_(grad, alpha=0.05)


class TensorAdam(Base):
    """Its number of steps is a tensor; the maximum of squares is replaced, not written to."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=p.dtype)
            state["m"], state["v"], state["most"] = (torch.zeros_like(p) for _ in range(3))
        step, m, v = state["step"], state["m"], state["v"]
        step += 1
        grad = grad.add(p, alpha=group["weight_decay"])
        m.lerp_(grad, 0.1)
        v.mul_(0.99).addcmul_(grad, grad, value=0.01)
        state["most"] = torch.maximum(state["most"], v / (1 - 0.99**step))
        p.addcdiv_(m / (1 - 0.9**step), state["most"].sqrt() + 1e-8, value=-group["lr"])


class HeavyBall(Base):
    """Out of place, with a rate in other positions."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("velocity", torch.zeros_like(p))
        state["velocity"] = torch.where(grad > 0, before * 0.8, before * 0.7) - group["lr"] * grad.clamp(-0.3, 0.3)
        p.copy_(p + state["velocity"] * 0.9 + (0.5 * group["lr"] + 0.01) * torch.tanh(before))


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(9, 13, dtype=dtype), torch.randn(9, 3, dtype=dtype)) for _ in range(4)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (SignedMomentum, "3/1/1/1,zero=1"), (SignedMomentum, "1/1/1/1"), (TensorAdam, "1/3/1/1"),
        (TensorAdam, "1/1/2/3"), (HeavyBall, "3/1/1/1,zero=3"), (torch.optim.Adadelta, "1/1/2/3"),
    ],
)  # fmt: skip
def test_steps(kind: type[torch.optim.Optimizer], strategy: str) -> None:
    """With a schedule, weight decay, and three steps after the first."""
    dtype = torch.float32 if strategy == "1/1/1/1" else torch.float64
    model, schedule = model_of(dtype), dr.lr.Cosine(0.05, 10, warmup=2)
    own, data = copy.deepcopy(model), batches(dtype)
    optimizer = dr.optim.TorchOptimizer(kind, lr=schedule, weight_decay=0.1, no_decay="2.*")
    step = dr.compile_training(
        model, F.mse_loss, optimizer=optimizer, example_batch=data[0], strategy=strategy, verify=True
    )
    second = [*own[2].parameters()]
    others = [p for p in own.parameters() if all(p is not q for q in second)]
    theirs = kind([{"params": others}, {"params": second, "weight_decay": 0.0}], lr=0.05, weight_decay=0.1)
    for number, batch in enumerate(data):
        for group in theirs.param_groups:
            group["lr"] = schedule(number)
        theirs.zero_grad()
        F.mse_loss(own(batch[0]), batch[1]).backward()
        theirs.step()
        step(*batch)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for name, parameter in own.named_parameters():
        assert not torch.equal(parameter, dict(model.named_parameters())[name])
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=tolerance, atol=tolerance)
    # State of one parameter on ranks, by torch's names; numbers that are no tensors stay in Python.
    state = step.plan.session().state()
    for label, expected in theirs.state[own[0].weight].items():
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(state[f"0.weight.{label}"], expected, rtol=tolerance, atol=tolerance)
    assert "0.weight.steps" not in state


def test_groups_bundles_and_masters(tmp_path: Path) -> None:
    model, data = model_of(torch.float32), batches(torch.float32)
    optimizer = dr.optim.Groups(dr.optim.SGD(0.1), {"0.*": dr.optim.TorchOptimizer(TensorAdam, lr=0.01)})
    step = dr.compile_training(
        model, F.mse_loss, optimizer=optimizer, example_batch=data[0], strategy="3/1/1/1", precision="bf16",
        averaging=dr.optim.EMA(0.5), clip_norm=1.0,
    )  # fmt: skip
    before = step.parameters()
    for batch in data:
        step(*batch)
    assert all(not torch.equal(before[name], tensor) for name, tensor in step.parameters().items())
    assert int(step.plan.session().state()["0.weight.step"]) == len(data)
    session = Session(read_bundle(step.save(tmp_path / "m.dist", ("torch",))))
    assert torch.equal(session.state()["0.weight.m"], step.plan.session().state()["0.weight.m"])
    copied = pickle.loads(pickle.dumps(optimizer.groups["0.*"]))
    assert repr(copied) == repr(optimizer.groups["0.*"]) == "TorchOptimizer(TensorAdam, lr=0.01)"
    assert copied.keeps == ("step", "m", "v", "most")


class PythonAdam(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        p.add_(grad, alpha=-group["lr"] / (1 - 0.9 ** state["n"]))


class Normed(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad / grad.norm(), alpha=-group["lr"])


class Reading(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * float(grad.reshape(-1)[0]))


class Squared(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-(group["lr"] ** 2))


class Branching(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad.sign() if group["lr"] > 0.3 else grad, alpha=-group["lr"])


class Rows(Base):
    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = state.setdefault("rows", torch.zeros(p.shape[0], 1, dtype=p.dtype))
        p.add_(grad + rows, alpha=-group["lr"])


class Late(Base):
    """It differs from the fourth step on, which no trace sees: its numbers are compared."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        p.add_(grad, alpha=-group["lr"] * (1 if state["n"] < 4 else 2))


class Vectors(Base):
    """Its state is zero for matrices alone, with the same ops: the error is that of a model with a bias."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sum"] = torch.full_like(p, 0.0 if p.dim() == 2 else 1.0)
        state["sum"].add_(grad)
        p.add_(state["sum"], alpha=-group["lr"])


def test_a_step_that_is_refused_for_some_parameters() -> None:
    optimizer = dr.optim.TorchOptimizer(Vectors, lr=0.1)
    model, batch = nn.Linear(13, 3, bias=False).double(), batches(torch.float64)[0]
    step = dr.compile_training(model, F.mse_loss, optimizer=optimizer, example_batch=batch)
    own = copy.deepcopy(model)
    F.mse_loss(own(batch[0]), batch[1]).backward()
    Vectors(own.parameters(), lr=0.1).step()
    step(*batch)
    torch.testing.assert_close(step.parameters()["weight"], own.weight.detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(DistIRError, match="its step 1 differs from the one that was traced"):
        dr.compile_training(model_of(torch.float64), F.mse_loss, optimizer=optimizer, example_batch=batch)


REFUSED = [
    (PythonAdam, {}, "its step depends on the number of steps in Python"),
    (Normed, {}, r"aten\.linalg_vector_norm\.default is not elementwise"),
    (Reading, {}, "its step reads a number from a tensor"),
    (Squared, {}, "its step is not linear in the learning rate"),
    (Branching, {}, "its ops depend on the learning rate"),
    (Rows, {}, "its state 'rows' has another shape than the parameter"),
    (Late, {}, "its step 4 differs from the one that was traced: it depends on the number of the step"),
    (
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5},
        "its step 1 differs from the one that was traced: its first state is not zero",
    ),
    (torch.optim.Adam, {}, "its step reads a number from a tensor"),
    (torch.optim.LBFGS, {}, "missing 1 required positional argument: 'closure'"),
    (SignedMomentum, {"lr": -1.0}, "expected lr of at least 0"),
    (torch.optim.SGD, {"speed": 3}, "unexpected keyword argument 'speed'"),
    (torch.optim.LBFGS, {"no_decay": "*"}, "expected weight_decay"),
    (nn.Linear, {}, "expected a class of torch.optim.Optimizer, found Linear"),
    (torch.optim.SGD([torch.zeros(1)], 0.1), {}, "found an object of type SGD"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DistIRError, match=message) as error:
        dr.optim.TorchOptimizer(kind, **options)
    assert "\n" not in error.value.message
