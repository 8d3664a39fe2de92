"""Training as users write it: hooks, losses with parameters, optimizers of their own or of torch, wrong options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import distir_relax as dr
from distir_relax.errors import DistIRError, ImportModelError, RunError
from distir_relax.ir import Value
from distir_relax.ops import Builder


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(11, 5, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)


def compiled(model: nn.Module, loss: Any = F.mse_loss, **options: Any) -> dr.TrainingStep:
    options = {"optimizer": dr.optim.SGD(lr=0.1), "example_batch": batch(), **options}
    return dr.compile_training(model, loss, **options)


class Hooked(nn.Module):
    """Doubles the gradient of what its first layer gives."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.layers = method, perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        getattr(y, self.method)(lambda grad: 2 * grad)
        return self.layers[2](torch.tanh(y))


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        (lambda m: m[0].weight.register_hook(lambda grad: 2 * grad), "0.weight"),
        (lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: None), "2.bias"),
        (lambda m: m[1].register_full_backward_hook(lambda m, given, grads: None), "1"),
        (lambda m: m.register_full_backward_pre_hook(lambda m, grads: None), "Sequential"),
    ],
)
def test_hooks_of_the_model_are_refused(hook: Callable[[nn.Module], Any], where: str) -> None:
    model = perceptron()
    hook(model)
    with pytest.raises(ImportModelError, match="hook on its gradient") as raised:
        compiled(model)
    assert raised.value.where == where


def test_a_hook_on_an_activation_is_refused_with_its_line() -> None:
    with pytest.raises(ImportModelError, match=r"hooks the gradient of a tensor \(register_hook\)") as raised:
        compiled(Hooked("register_hook"))
    assert raised.value.where.startswith("test_user_mistakes.py:")
    # Torch has its own methods back.
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"


class Head(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.tensor(0.7).double()), nn.Linear(3, 3).double()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(output) * self.scale, target)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/2,zero=2", "1/1/2/3"])
def test_parameters_of_a_loss_are_trained(strategy: str) -> None:
    torch.manual_seed(0)
    model, head = perceptron(), Head()
    ours = compiled(model, head, strategy=strategy)
    steps = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    x, y = batch()
    for _ in range(3):
        steps.zero_grad()
        loss = head(model(x), y)
        loss.backward()
        steps.step()
        assert ours(x, y) == pytest.approx(loss.item(), rel=1e-12)
    expected = {**dict(model.named_parameters()), **{f"loss.{n}": p for n, p in head.named_parameters()}}
    torch.testing.assert_close(ours.parameters(), {n: p.detach() for n, p in expected.items()})
    assert "loss" not in dict(model.named_modules())


def test_parameters_outside_the_model_are_refused() -> None:
    head = nn.Linear(3, 3).double()
    with pytest.raises(ImportModelError, match=r"a parameter of shape \(3, 3\) is used that belongs to no module"):
        compiled(perceptron(), lambda y, t: F.mse_loss(head(y), t))
    head.requires_grad_(False)
    compiled(perceptron(), lambda y, t: F.mse_loss(head(y), t))


class Unused(nn.Module):
    """Has a layer that its result does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(5, 3).double(), nn.Linear(2, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_parameters_are_all_of_the_model() -> None:
    model = Unused()
    step = compiled(model)
    step(*batch())
    found = step.parameters()
    assert found.keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(found["idle.weight"], model.idle.weight.detach())
    assert not torch.equal(found["used.weight"], model.used.weight)
    model.load_state_dict(found)


@dataclass(frozen=True)
class Written(dr.optim.Optimizer):
    """Momentum in ordinary ops; `update` is a parameter of the test."""

    write: Callable[..., Mapping[str, Value]] = lambda *_: {}
    lr: float = 0.125

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("average",)

    def update(self, g: Builder, parameter: Value, gradient: Value, state: Any, numbers: Any) -> dict[str, Value]:
        return dict(self.write(g, parameter, gradient, state["average"], numbers["rate"]))


def momentum(g: Builder, x: Value, grad: Value, average: Value, rate: Value) -> dict[str, Value]:
    new = g.emit("add", g.emit("multiply", average, g.constant(0.9, "float64")), grad)
    return {"": g.emit("subtract", x, g.emit("multiply", new, rate)), "average": new}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        ("1/1/1/1", "torch"),
        ("1/3/1/1", "torch"),
        ("3/1/1/1,zero=1", "torch"),
        ("3/1/1/2,zero=3", "torch"),
        ("1/1/2/2", "torch"),
        ("1/3/1/1", "tvm"),
    ],
)
def test_an_optimizer_of_ordinary_ops_trains(strategy: str, backend: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = perceptron(), batch()
    step = compiled(model, optimizer=Written(momentum), strategy=strategy, verify=True)
    steps = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    for _ in range(3):
        steps.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        steps.step()
        assert step(x, y, backend=backend) == pytest.approx(loss.item(), rel=1e-9)
    found = step.parameters(backend)
    torch.testing.assert_close(found, {n: p.detach() for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda g, x, grad, average, rate: {"": grad}, "expected a new value of the state 'average', found none"),
        (lambda g, x, grad, average, rate: {"average": grad}, "expected a new value of the parameter"),
        (
            lambda g, x, grad, average, rate: {"": grad, "average": grad, "more": grad},
            "'more', which `states` does not",
        ),
        (lambda g, x, grad, average, rate: {"": grad, "average": rate}, r"of type .*f64\[7,5\], found f64\[\]"),
        # Each takes the other's place, so that one of them would be read after it was overwritten.
        (lambda g, x, grad, average, rate: {"": average, "average": x}, "assign reads the old value"),
        (
            lambda g, x, grad, average, rate: {"": g.emit("sgd_step", x, grad, rate, decay=0.0), "average": x},
            "assign reads the old value .* after sgd_step has overwritten it",
        ),
    ],
)
def test_an_optimizer_that_is_wrong_is_refused(write: Any, message: str) -> None:
    with pytest.raises(DistIRError, match=message) as raised:
        compiled(perceptron(), optimizer=Written(write))
    assert "Written.update, for the parameter" in raised.value.where


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.AdamW, "found the class torch.optim.adamw.AdamW"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "found an object of type torch.optim.sgd.SGD"),
        (dr.optim.AdamW, "found the class distir_relax.optimizers.adam.AdamW"),
        (3, "found an object of type builtins.int"),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        compiled(perceptron(), optimizer=optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.optim.SGD(lr="x"), "expected lr to be a number, found 'x'"),
        (
            lambda: dr.optim.SGD(momentum=lambda step: 0.1),  # type: ignore[arg-type]
            r"momentum to be a number, found <function.*\n.*dr.lr.Tabulated.of\(function",
        ),
        (lambda: dr.optim.SGD(momentum=None), "expected momentum to be a number"),
        (lambda: dr.optim.AdamW(betas=()), "expected two betas from 0 to below 1"),
        (lambda: dr.optim.AdamW(betas=(dr.lr.Constant(0.9), 1.0)), "expected two betas from 0 to below 1"),
        (lambda: dr.optim.NAdam(betas=(dr.lr.Constant(0.9), 0.99)), "expected two betas from 0 to below 1"),
        (lambda: dr.optim.SGD(momentum=0.9, dampening="y"), "expected dampening to be a number"),
        (lambda: dr.optim.Adam(betas=0.9), "two betas from 0 to below 1, found 0.9"),
        (lambda: dr.optim.Adam(betas=("a", "b")), "two betas from 0 to below 1"),
        (lambda: dr.optim.AdamW(eps=dr.lr.Constant(0.1)), "expected eps to be a number"),
        (lambda: dr.optim.AdamW(no_decay=3), "expected no_decay to be patterns"),
    ],
)
def test_options_of_other_kinds_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        make()


def test_a_function_of_the_step_is_a_schedule() -> None:
    rates = dr.lr.Tabulated.of(lambda step: 0.1 / (step + 1), steps=3)
    assert [rates(step) for step in range(5)] == [0.1, 0.05, 0.1 / 3, 0.1 / 3, 0.1 / 3]
    with pytest.raises(DistIRError, match="expected steps to be a whole number of at least 1, found 0"):
        dr.lr.Tabulated.of(lambda step: 0.1, steps=0)


def test_one_pattern_without_decay_may_be_a_string() -> None:
    torch.manual_seed(0)
    found = []
    model = perceptron()
    for no_decay in ("*.bias", ("*.bias",), ()):
        step = compiled(deepcopy(model), optimizer=dr.optim.AdamW(lr=0.1, weight_decay=0.9, no_decay=no_decay))
        torch.manual_seed(1)
        step(*batch())
        found.append(step.parameters())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.equal(found[0]["0.bias"], found[2]["0.bias"])
    assert torch.equal(found[0]["0.weight"], found[2]["0.weight"])


class Recomputed(nn.Module):
    """Activation checkpointing of torch, around a dropout."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.layers = reentrant, nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.layers[:2], x, use_reentrant=self.reentrant)
        return self.layers[2](y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_torch_has_its_gradients(reentrant: bool) -> None:
    model, (x, y) = Recomputed(reentrant), batch()
    own = deepcopy(model.layers)
    step = compiled(model, example_batch=(x, y))
    step(x, y)
    F.mse_loss(own(x), y).backward()
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(step.parameters()[f"layers.{name}"], expected)


class OwnLoss(nn.Module):
    """A loss of the user's, whose line is known."""

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, labels)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1"])
@pytest.mark.parametrize(
    ("loss", "where"),
    [
        (F.cross_entropy, "the loss"), (lambda y, t: F.cross_entropy(y, t), "the loss"),
        (nn.CrossEntropyLoss(), "the loss"), (OwnLoss(), "test_user_mistakes.py:"),
    ],
)  # fmt: skip
def test_label_out_of_range_is_one_of_the_loss(loss: Any, where: str, strategy: str) -> None:
    x, labels = batch()[0], torch.arange(11) % 3
    step = compiled(perceptron(), loss, example_batch=(x, labels), strategy=strategy)
    labels[7] = 3
    with pytest.raises(
        RunError, match=r"gather is given the index 3, which is out of range: valid are from 0 to 2"
    ) as e:
        step(x, labels)
    assert e.value.where.startswith(where)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"clipnorm": 1.0}, TypeError, "there is no option 'clipnorm', did you mean 'clip_norm'.*, gradient_norm,"),
        ({"precision": "bfloat16"}, DistIRError, "found 'bfloat16'\n  hint: write precision='bf16'"),
        ({"precision": torch.float16}, DistIRError, "found torch.float16\n  hint: write precision='fp16'"),
        ({"precision": "int8"}, DistIRError, "found 'int8'\n  hint: weights of 8 and 4 bits are for inference"),
    ],
)
def test_options_with_another_spelling_are_named(options: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(perceptron(), **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("clipnorm", "there is no option 'clipnorm', did you mean 'clip_norm'.*model, loss, .*, gradient_norm,"),
        ("strategy", r"'strategy' is an option of compilation: Training\(...\).compile\(strategy=...\)"),
    ],
)
def test_options_of_a_training_are_listed(option: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dr.Training(perceptron(), F.mse_loss, **{option: 1.0})  # type: ignore[arg-type]
    assert list(inspect.signature(dr.Training).parameters)[:2] == ["model", "loss"]


def squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum(0)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("vmap", lambda y: torch.func.vmap(squares)(y)), ("jacrev", lambda y: torch.func.jacrev(squares)(y)),
        ("vmap", lambda y: torch.func.vmap(torch.func.grad(squares))(y)),
        ("jacfwd", lambda y: torch.func.hessian(lambda z: squares(z).sum())(y)),
        ("jvp", lambda y: torch.func.jvp(squares, (y,), (torch.ones_like(y),))[1]),
    ],
)  # fmt: skip
def test_function_that_is_not_captured_is_named(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(DistIRError, match=rf"torch\.func\.{name} .* not captured") as caught:
        compiled(perceptron(), lambda y, targets: function(y).sum() + 0 * targets.sum())
    assert "torch.func.grad are captured" in caught.value.hint
    # Its levels are over: random numbers can be drawn.
    torch.randn(2)


class Branching(nn.Module):
    """A branch by the values of a tensor."""

    def __init__(self, condition: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.condition = perceptron(), condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y * 2 if self.condition(y) else y


@pytest.mark.parametrize("condition", [lambda y: y.sum() > 0, lambda y: y.max().item() > 1])
def test_branch_by_values_is_one_error(condition: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportModelError, match="its control flow depends on the values of a tensor") as caught:
        compiled(Branching(condition))
    assert caught.value.where.startswith("test_user_mistakes.py:")
    assert "torch.where" in caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_index_by_values_is_named() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()
            self.register_buffer("rows", torch.zeros(4, 3, dtype=torch.float64))
            self.register_buffer("next", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layers(x)
            self.rows[int(self.next)] = y.detach().mean(0)
            return y - self.rows.mean(0)

    with pytest.raises(ImportModelError, match="a size or an index depends on the values of a tensor") as caught:
        compiled(Queue())
    assert "index_copy" in caught.value.hint


def test_a_sampler_of_other_ranks_is_refused() -> None:
    x, y = batch()
    samples = TensorDataset(x, y)
    step = compiled(perceptron(), strategy="2/1/1/1")
    loader = DataLoader(samples, batch_size=5, sampler=DistributedSampler(samples, num_replicas=2, rank=0))
    with pytest.raises(RunError, match="found a DistributedSampler\n  hint: leave the sampler out"):
        dr.train(step, loader, steps=2)
    with pytest.raises(RunError, match="found True\n  hint: 'auto' continues from the newest checkpoint"):
        dr.train(step, [batch()], steps=2, checkpoint="ck", resume=True)  # type: ignore[arg-type]
