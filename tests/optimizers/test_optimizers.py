"""Optimizers against torch's own, in float64, on one process and on ranks; clipping, masters, what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError
from distir_relax.ops import lookup
from distir_relax.optimizers import STEP, MasterWeights, Optimize
from distir_relax.runtime.session import Session
from distir_relax.support.learning_rate import RATE
from tests.optimizers.steps import Perceptron, batches, by_torch, trained, training, training_plan, updated

# Rates that a float32 has as they are: the input of the program is one.
LR = 2.0**-5
OURS_AND_TORCHS: list[tuple[Any, Callable[..., torch.optim.Optimizer]]] = [
    (dr.optim.SGD(LR), lambda p: torch.optim.SGD(p, LR)),
    (dr.optim.SGD(LR, weight_decay=0.1), lambda p: torch.optim.SGD(p, LR, weight_decay=0.1)),
    (
        dr.optim.SGD(LR, momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
    (
        dr.optim.SGD(LR, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    (dr.optim.Adam(LR), lambda p: torch.optim.Adam(p, LR)),
    (
        dr.optim.Adam(LR, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, LR, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    (dr.optim.AdamW(LR), lambda p: torch.optim.AdamW(p, LR)),
    (dr.optim.AdamW(LR, own_steps=True), lambda p: torch.optim.AdamW(p, LR)),
    (dr.optim.RAdam(LR, own_steps=True), lambda p: torch.optim.RAdam(p, LR)),
    (dr.optim.AdamW(LR, weight_decay=0.3), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.3)),
    (dr.optim.SGD(LR, momentum=0.9, maximize=True), lambda p: torch.optim.SGD(p, LR, momentum=0.9, maximize=True)),
    (
        dr.optim.Adam(LR, amsgrad=True, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.Adam(p, LR, amsgrad=True, weight_decay=0.1, maximize=True),
    ),
    (
        dr.optim.AdamW(LR, betas=(0.5, 0.6), amsgrad=True),
        lambda p: torch.optim.AdamW(p, LR, betas=(0.5, 0.6), amsgrad=True),
    ),
    (dr.optim.RMSprop(LR), lambda p: torch.optim.RMSprop(p, LR)),
    (
        dr.optim.RMSprop(LR, alpha=0.8, eps=1e-3, weight_decay=0.1, momentum=0.7, centered=True),
        lambda p: torch.optim.RMSprop(p, LR, alpha=0.8, eps=1e-3, weight_decay=0.1, momentum=0.7, centered=True),
    ),
    (dr.optim.Adadelta(), torch.optim.Adadelta),
    (
        dr.optim.Adadelta(LR, rho=0.7, eps=1e-3, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.Adadelta(p, LR, 0.7, 1e-3, 0.1, maximize=True),
    ),
    (dr.optim.RAdam(LR, betas=(0.8, 0.6)), lambda p: torch.optim.RAdam(p, LR, (0.8, 0.6))),
    (dr.optim.Adagrad(LR), lambda p: torch.optim.Adagrad(p, LR)),
    (dr.optim.Adagrad(LR, lr_decay=0.3, weight_decay=0.1), lambda p: torch.optim.Adagrad(p, LR, 0.3, 0.1)),
    (dr.optim.Adafactor(LR), lambda p: torch.optim.Adafactor(p, LR)),
    (
        dr.optim.Adafactor(0.5, beta2_decay=-0.5, eps=(1e-2, 0.5), d=1.5, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, 0.5, beta2_decay=-0.5, eps=(1e-2, 0.5), d=1.5, weight_decay=0.1),
    ),
    (dr.optim.Lion(LR), lambda p: Lion(p, LR)),
    (dr.optim.Lion(LR, betas=(0.7, 0.8), weight_decay=0.3), lambda p: Lion(p, LR, (0.7, 0.8), 0.3)),
]


class Lion(torch.optim.Optimizer):
    """The paper's algorithm 2."""

    def __init__(
        self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (first * average + (1 - first) * p.grad).sign() + group["decay"] * p
                average.mul_(second).add_(p.grad, alpha=1 - second)
                p.sub_(group["lr"] * direction)


class Several(torch.optim.Optimizer):
    """Several of torch's optimizers, each of other parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})

    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


def assert_same(found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]) -> None:
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True), 1):
        # Numbers of torch's state are left out.
        counts = {name for name in mine if name == STEP or name.endswith(".step")}
        assert all(int(mine[name]) == number for name in counts)
        assert mine.keys() - counts == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(
                mine[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("optimizer", "make"), OURS_AND_TORCHS, ids=lambda x: str(x) if not callable(x) else "")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_is_torch_s(optimizer: Any, make: Callable[..., Any], clip: float | None) -> None:
    torch.manual_seed(0)
    model, data = Perceptron(), batches(4)
    step = Optimize(optimizer, clip_norm=clip)
    imported, module = training(copy.deepcopy(model), data[0], step)
    assert_same(trained(imported, module, step, data), by_torch(model, make(model.parameters()), data, clip))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["NAdam", "RAdam"])
def test_more_steps_are_torch_s(name: str, decoupled: bool) -> None:
    """RAdam's first steps are not rectified. Torch has NAdam's product of momenta in the default dtype."""
    torch.manual_seed(0)
    model, data = Perceptron(), batches(9)
    options: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    options |= {"decoupled_weight_decay": decoupled, **({"momentum_decay": 0.3} if name == "NAdam" else {})}
    step = Optimize(getattr(dr.optim, name)(LR, **options))
    imported, module = training(copy.deepcopy(model), data[0], step)
    theirs = getattr(torch.optim, name)(model.parameters(), LR, **options)
    for mine, other in zip(trained(imported, module, step, data), by_torch(model, theirs, data), strict=True):
        assert {key for key in mine if not key.endswith("mu_product")} - {STEP} == set(other)
        for key, value in other.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-6, atol=1e-9)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"averaging": dr.optim.EMA(0.5)}], ids=str)
@pytest.mark.parametrize("strategy", ["2/1/1/1,zero=3", "1/3/1/1", "1/1/2/2", "2/1/1/1,zero=1"])
def test_own_counts_that_begin_together_are_one_count(strategy: str, options: dict[str, Any]) -> None:
    data, found = batches(3, rows=12, dtype=torch.float32), []
    for own in (False, True):
        torch.manual_seed(0)
        optimizer = dr.optim.AdamW(LR, own_steps=own)
        model = Perceptron(torch.float32)
        step = dr.compile_training(model, optimizer=optimizer, example_batch=data[0], strategy=strategy, **options)
        found.append([step(batch) for batch in data])
        step.plan.bundle()
    assert found[0] == found[1]


def test_some_parameters_have_no_decay() -> None:
    torch.manual_seed(0)
    model, data = Perceptron(), batches(3)
    step = Optimize(dr.optim.AdamW(LR, weight_decay=0.3, no_decay=("*.bias", "norm*")))
    imported, module = training(copy.deepcopy(model), data[0], step)
    decayed = [model.up.weight, model.down.weight]
    others = [p for p in model.parameters() if all(p is not d for d in decayed)]
    theirs = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], LR)
    assert_same(trained(imported, module, step, data), by_torch(model, theirs, data))


def test_patterns_that_match_no_parameter_are_errors() -> None:
    model, data = Perceptron(), batches(1)
    for optimizer in (
        dr.optim.AdamW(LR, no_decay=("norm*", "*.biass")),
        dr.optim.Groups(dr.optim.SGD(LR), {"up.weight": dr.optim.AdamW(LR, no_decay="*.biass")}),
    ):
        message = r"(?s)AdamW: no parameter matches '\*\.biass' of `no_decay`.*names such as .*\.bias"
        with pytest.raises(DistIRError, match=message):
            training(model, data[0], Optimize(optimizer))


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_groups_have_optimizers_of_their_own(adjust: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon for matrices, one of which is tall, and SGD with another rate for a norm; torch's Muon in float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    torch.manual_seed(0)
    model, data = Perceptron(), batches(4)
    groups = {
        "up.weight": dr.optim.Muon(LR, momentum=0.8, adjust_lr_fn=adjust),
        "down.weight": dr.optim.Muon(LR, nesterov=False, weight_decay=0.0, ns_steps=3, adjust_lr_fn=adjust),
        "norm.*": dr.optim.SGD(dr.lr.StepDecay(LR, 2, 0.5), momentum=0.9),
    }
    step = Optimize(dr.optim.Groups(dr.optim.AdamW(LR, weight_decay=0.3), groups), clip_norm=0.5)
    imported, module = training(copy.deepcopy(model), data[0], step)
    assert [i.value.name for i in module.main.inputs if i.value.name.startswith(RATE)] == [RATE, f"{RATE}.1"]
    sgd = torch.optim.SGD(model.norm.parameters(), LR, momentum=0.9)
    rates = iter((LR, LR, LR / 2, LR / 2))
    sgd.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=next(rates)))
    theirs = Several(
        torch.optim.Muon([model.up.weight], LR, momentum=0.8, adjust_lr_fn=adjust),
        torch.optim.Muon([model.down.weight], LR, nesterov=False, weight_decay=0.0, ns_steps=3, adjust_lr_fn=adjust),
        torch.optim.AdamW([model.up.bias, model.down.bias], LR, weight_decay=0.3),
        sgd,
    )
    assert_same(trained(imported, module, step, data), by_torch(model, theirs, data, 0.5))


def test_a_schedule_is_followed() -> None:
    torch.manual_seed(0)
    model, data = Perceptron(), batches(3)
    step = Optimize(dr.optim.SGD(dr.lr.StepDecay(LR, 2, 0.5)))
    imported, module = training(copy.deepcopy(model), data[0], step)
    found = trained(imported, module, step, data)
    rates = iter((LR, LR, LR / 2))
    optimizer = torch.optim.SGD(model.parameters(), LR)
    optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=next(rates)))
    assert_same(found, by_torch(model, optimizer, data))


def test_only_what_is_asked_for_is_trained() -> None:
    model, data = Perceptron(), batches(2)
    _, module = training(model, data[0], Optimize(dr.optim.SGD(), trained=("up.weight", "down.bias")))
    assert [o.name for o in module.main.outputs] == ["output", "up.weight.new", "down.bias.new"]


def test_updates_are_in_place_and_have_no_place_in_the_model() -> None:
    model, data = Perceptron(), batches(1)
    _, module = training(model, data[0], Optimize(dr.optim.AdamW(), clip_norm=1.0))
    made = {op.results[0].name: op for op in module.main.ops}
    states = {i.value.name for i in module.main.inputs if i.role in ("state", "parameter")}
    updates = [o for o in module.main.outputs[1:] if o.name != "gradient_norm"]
    assert len(updates) == len(module.main.outputs) - 2
    for output in updates:
        op = made[output.value.name]
        assert op.operands[0].name == output.name.removesuffix(".new")
        assert lookup(op.name).updates
        assert op.location == ""
        states.remove(op.operands[0].name)
    assert not states


class Single(nn.Module):
    """One product, and the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(5, 3, bias=False).double()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((self.down(x) - target) ** 2).mean()


def on_ranks(model: nn.Module, step: Optimize, data: Any, backend: str, **options: Any) -> list[Any]:
    """What ranks that keep their state compute, step by step."""
    plan = training_plan(model, data[0], step, **options)
    session, found = Session(plan.bundle((backend,)), backend), []
    for args in data:
        rate = {RATE: torch.tensor(step.optimizer.lr, dtype=torch.float64)}
        outputs = session({**plan.imported.flatten(args, {}), **rate})
        found.append({**updated(outputs), "loss": outputs["output"]})
    return found


@pytest.mark.parametrize(
    ("shardings", "optimizer", "make", "backend", "tail"),
    [
        # In mode pad what is updated in place may be a copy that was filled up.
        ({"up.weight": "S[0]"}, *OURS_AND_TORCHS[7], "torch", "pad"),
        ({"x": "S[0]", "target": "S[0]"}, *OURS_AND_TORCHS[3], "torch", "ragged"),
        ({"down.weight": "S[1]"}, *OURS_AND_TORCHS[5], "tvm", "pad"),
    ],
    ids=lambda x: "torch" if callable(x) and "lambda" in repr(x) else str(x),
)
def test_ranks_clip_and_step_as_one(
    shardings: dict[str, str], optimizer: Any, make: Callable[..., Any], backend: str, tail: str
) -> None:
    torch.manual_seed(0)
    # TVM takes its time to compile.
    model, data = Single() if backend == "tvm" else Perceptron(), batches(3)
    found = on_ranks(
        copy.deepcopy(model), Optimize(optimizer, clip_norm=0.5), data, backend, shardings=shardings, mesh=3, tail=tail
    )
    assert_same(found, by_torch(model, make(model.parameters()), data, 0.5))


def test_masters_are_float32_and_keep_what_bfloat16_loses() -> None:
    torch.manual_seed(0)
    model, data = Perceptron(torch.bfloat16), batches(1, dtype=torch.bfloat16)
    step = Optimize(dr.optim.SGD(2.0**-14))
    imported, module = training(copy.deepcopy(model), data[0], step, MasterWeights())
    (found,) = trained(imported, module, step, data)
    model(*data[0]).backward()
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.float32
        # The gradient is that of the model in bfloat16, the step one of float32.
        step_down = (parameter.detach().float() - found[name]) * 2**14
        torch.testing.assert_close(
            step_down, parameter.grad.float(), rtol=0.05, atol=0.05 * float(step_down.abs().max())
        )
    still = found["up.weight"].bfloat16() == model.up.weight
    assert still.float().mean() > 0.5
    assert (found["up.weight"] != model.up.weight.float()).all()


def test_what_cannot_be_trained_is_said() -> None:
    model, data = Perceptron(), batches(1)
    imported, module = training(model, data[0], Optimize(dr.optim.SGD()))
    with pytest.raises(DistIRError, match=r"gives no gradient of up\.weight"):
        Optimize(dr.optim.SGD()).run(imported.module)
    with pytest.raises(DistIRError, match=r"no parameter 'up\.wieght' to train"):
        Optimize(dr.optim.SGD(), trained=("up.wieght",)).run(module)
    with pytest.raises(DistIRError, match=r"no trained parameter matches 'out\.\*'"):
        training(model, data[0], Optimize(dr.optim.Groups(dr.optim.SGD(), {"out.*": dr.optim.SGD()})))
    with pytest.raises(DistIRError, match=r"expected a matrix, found 'up\.bias' of shape \(7,\)"):
        training(model, data[0], Optimize(dr.optim.Muon()))
    with pytest.raises(DistIRError, match="norm above 0"):
        Optimize(dr.optim.SGD(), clip_norm=0).run(module)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dr.optim.SGD(-1.0), "expected lr of at least 0"),
        (lambda: dr.optim.SGD(0.1, nesterov=True), "Nesterov momentum needs"),
        (lambda: dr.optim.Adam(betas=(0.9, 1.0)), "two betas from 0 to below 1"),
        (lambda: dr.optim.AdamW(weight_decay=float("nan")), "weight_decay of at least 0"),
        (lambda: dr.lr.Cosine(0.1, 10, warmup=10), "more steps than there are of warm-up"),
        (lambda: dr.lr.StepDecay(0.1, 0), "at least one step"),
        (lambda: dr.lr.Linear(-0.1, 10), "a learning rate of at least 0"),
        (lambda: dr.optim.RMSprop(alpha=1.0), "an alpha from 0 to below 1, found 1.0"),
        (lambda: dr.optim.Adagrad(lr_decay=-1.0), "lr_decay of at least 0"),
        (lambda: dr.optim.Adafactor(eps=0.1), "two values of eps"),
        (lambda: dr.optim.Adafactor(beta2_decay=0.8), "beta2_decay of at most 0"),
        (lambda: dr.optim.Adafactor(d=0.5), "d of at least 1"),
        (lambda: dr.optim.Lion(betas=(0.9,)), "two betas from 0 to below 1"),
        (lambda: dr.optim.Muon(ns_coefficients=(1, 2)), "three ns_coefficients"),
        (lambda: dr.optim.Muon(ns_steps=100), "ns_steps from 0 to below 100"),
        (lambda: dr.optim.Muon(adjust_lr_fn="other"), "adjust_lr_fn of original, match_rms_adamw, none"),
        (lambda: dr.optim.Muon(ns_dtype="int8"), "ns_dtype of bfloat16"),
        (lambda: dr.optim.Groups(dr.optim.SGD, {}), "expected an optimizer such as"),
        (
            lambda: dr.optim.Groups(dr.optim.SGD(), {"*": dr.optim.Groups(dr.optim.SGD())}),
            r"found Groups\n.*the group '\*'|found Groups",
        ),
    ],
)
def test_options_are_checked(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DistIRError, match=words):
        make()
