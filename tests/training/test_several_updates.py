"""Several updates in a step, each by its own loss: as a loop of torch makes them, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.counterexample.search import Stages, find_counterexample
from distir_relax.errors import DistIRError, ImportModelError, VerificationError
from distir_relax.ir import UpdateProgram
from distir_relax.optimizers import OrderUpdates
from distir_relax.proof.model import check_model
from distir_relax.proof.plan import TRAINING

STRATEGIES = ["1/1/1/1", "3/1/1/1", "3/1/1/1,zero=1", "2/1/1/1,zero=2", "2/1/1/1,zero=3", "1/3/1/1"]
Batch = dict[str, torch.Tensor]


def losses(critic: nn.Module, generator: nn.Module, real: torch.Tensor, noise: torch.Tensor) -> Any:
    """The losses of a GAN, one after the other."""
    fake = generator(noise)
    ones = torch.ones(real.shape[0], 1)
    yield F.binary_cross_entropy_with_logits(critic(real), ones) + F.binary_cross_entropy_with_logits(
        critic(fake.detach()), 1 - ones
    )
    yield F.binary_cross_entropy_with_logits(critic(fake), ones)


class GAN(nn.Module):
    """A generator, and a critic with statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(5, 17, bias=False), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 7, bias=False)
        )
        self.critic = nn.Sequential(
            nn.Linear(7, 13, bias=False), nn.BatchNorm1d(13), nn.LeakyReLU(0.2), nn.Linear(13, 1)
        )

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        critic, generator = losses(self.critic, self.generator, real, noise)
        return {"generator": generator, "critic": critic}


@pytest.fixture
def gan() -> GAN:
    torch.manual_seed(0)
    return GAN()


def batches(count: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"real": torch.randn(12, 7, generator=generator) + 1, "noise": torch.randn(12, 5, generator=generator)}
        for _ in range(count)
    ]


def updates(every: int = 1) -> list[dr.optim.Update]:
    return [
        dr.optim.Update("critic", "critic.*", dr.optim.Adam(1e-2)),
        dr.optim.Update("generator", "generator.*", dr.optim.AdamW(dr.lr.Linear(3e-3, 9)), every),
    ]


def by_torch(model: GAN, data: Sequence[Batch], every: int = 1, clip: float | None = None) -> list[tuple[float, ...]]:
    """Train as a loop of torch does; return the losses."""
    critic = torch.optim.Adam(model.critic.parameters(), lr=1e-2)
    generator = torch.optim.AdamW(model.generator.parameters())
    found = []
    for number, batch in enumerate(data):
        one, other = losses(model.critic, model.generator, **batch), []
        for optimizer, module in ((critic, model.critic), (generator, model.generator)):
            loss = next(one)
            other.append(float(loss.detach()))
            optimizer.zero_grad()
            if optimizer is critic or number % every == 0:
                for group in optimizer.param_groups if optimizer is generator else ():
                    group["lr"] = dr.lr.Linear(3e-3, 9)(number)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
        found.append(tuple(other))
    return found


@pytest.mark.drawn(2)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gan_trains_as_in_torch(gan: GAN, strategy: str, every: int) -> None:
    """The second loss sees the critic after its update; statistics are those of all calls in order."""
    reference = copy.deepcopy(gan)
    expected = by_torch(reference, batches(), every, clip=0.3)
    step = dr.compile_training(
        gan, optimizer=updates(every), example_batch=batches()[0], strategy=strategy, clip_norm=0.3
    )
    found = []
    for batch in batches():
        assert step(batch) == step.losses["critic"]
        found.append(tuple(step.losses.values()))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    step.copy_to_model(gan)
    torch.testing.assert_close(gan.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


def test_autocast_casts_a_weight_again_after_its_update(gan: GAN) -> None:
    """In bfloat16 the losses of several steps are near those of torch's autocast."""
    reference = copy.deepcopy(gan)
    step = dr.compile_training(gan, optimizer=updates(), example_batch=batches()[0], precision="bf16")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = by_torch(reference, batches(3))
    found = []
    for batch in batches(3):
        step(batch)
        found.append(tuple(step.losses.values()))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=2e-3)
    main = step.plan.modules["global"].main
    assert sum(op.name == "astype" and "critic.0.weight" in str(op.operands[0].name) for op in main.ops) == 2


class Actor(nn.Module):
    """Two networks of the same input, and three updates, of losses that are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value, self.temperature = nn.Linear(5, 3), nn.Linear(5, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.policy(x).log_softmax(-1), self.value(x)[:, 0], self.temperature.exp()


def actor_losses(output: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    log, value, temperature = output
    action, reward = targets
    advantage = (reward - value).detach()
    entropy = -(log.exp() * log).sum(-1).mean()
    return {
        "policy": -(log.gather(1, action[:, None])[:, 0] * advantage).mean() - temperature.detach() * entropy,
        "value": F.mse_loss(value, reward),
        "temperature": temperature * (entropy.detach() - 0.7),
    }


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=1"])
def test_losses_that_are_computed_at_once(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Actor()
    reference = copy.deepcopy(model)
    data = [(torch.randn(9, 5), (torch.randint(3, (9,)), torch.randn(9))) for _ in range(5)]
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (
        reference.policy.parameters(), reference.value.parameters(), [reference.temperature]
    )]  # fmt: skip
    for x, targets in data:
        for optimizer, loss in zip(optimizers, actor_losses(reference(x), targets).values(), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    parts = [dr.optim.Update(name, f"{name}*", dr.optim.SGD(0.1)) for name in ("policy", "value", "temperature")]
    step = dr.compile_training(model, actor_losses, optimizer=parts, example_batch=data[0], strategy=strategy)
    step.save(tmp_path / "actor.dist")
    log = tmp_path / "log.jsonl"
    ended = dr.train(
        tmp_path / "actor.dist", data, steps=3, checkpoint=tmp_path / "ck", callbacks=[dr.callbacks.JSONLogger(log)]
    )
    assert ended.step == 3
    assert '"loss/temperature"' in log.read_text()
    ended = dr.train(step, data, steps=5, checkpoint=tmp_path / "ck", resume="last")
    assert ended.step == 5
    found = step.parameters()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_averages_and_memory(gan: GAN) -> None:
    """Averages are of all parameters after each step; the simulator has the program of both updates."""
    step = dr.compile_training(
        gan, optimizer=updates(2), example_batch=batches()[0], strategy="2/1/1/1", averaging=dr.optim.EMA(0.9)
    )
    expected: Batch = {}
    for batch in batches(4):
        step(batch)
        expected = {name: 0.9 * expected.get(name, p) + 0.1 * p for name, p in step.parameters().items()}
    torch.testing.assert_close(step.parameters(averaged=True), expected, rtol=1e-5, atol=1e-6)
    one = dr.compile_training(
        GAN(), lambda output, _: output["critic"] + output["generator"], optimizer=dr.optim.Adam(), strategy="2/1/1/1",
        example_batch=(batches()[0], torch.zeros(12)),
    )  # fmt: skip
    simulated, single = (dr.simulate(s.plan, profile="cpu-local") for s in (step, one))
    assert simulated.makespan > single.makespan


def test_a_proof_knows_the_order(gan: GAN, tmp_path: Path) -> None:
    """A step whose second loss sees the parameters before the first update is not the model's."""
    training = dr.Training(gan, optimizer=updates(3), example_batch=batches()[0])  # type: ignore[arg-type]
    source = training.read({"strategy": "2/1/1/1"})
    step = dr.compile_training(gan, optimizer=updates(3), example_batch=batches()[0], strategy="2/1/1/1")
    assert [r.loss for r in step.plan.modules["sharded"].records if isinstance(r, UpdateProgram)] == [
        "critic",
        "generator",
    ]
    assert check_model(source.imported.module, step.plan.modules["sharded"]) == []
    passes = [p for p in source.distributed_passes(repeated=False) if not isinstance(p, OrderUpdates)]
    number = next(i for i, p in enumerate(passes) if type(p).__name__ == "DelayReductions")
    wrong = run_passes(source.imported.module, passes[: number + 1], [])
    with pytest.raises(VerificationError, match="the output 'generator' is not the model's"):
        check_model(source.imported.module, wrong)
    # No counterexample is made up: the model alone has other losses than the step.
    stages = Stages(step.plan.modules["ranked"], step.plan.modules["distributed"], wrong, source.imported.module)
    found = find_counterexample(stages, TRAINING)
    assert (found.tried, found.reason) == (0, "a later loss is of the parameters after the updates before it")
    step.save(tmp_path / "gan.dist")
    assert read_bundle(tmp_path / "gan.dist").manifest.training.losses == ("critic", "generator")  # type: ignore[union-attr]


class Shared(nn.Module):
    """A second loss of features that the first update has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        middle = self.second(self.first(x))
        return {"one": middle.square().mean(), "two": self.third(self.second(middle)).mean()}


def refused(model: nn.Module, parts: Any, message: str, kind: type[DistIRError] = DistIRError, **options: Any) -> None:
    batch = options.pop("example_batch", torch.randn(6, 3))
    with pytest.raises(kind) as raised:
        dr.compile_training(model, optimizer=parts, example_batch=batch, **options)
    assert message in str(raised.value)


def test_what_is_refused(gan: GAN) -> None:
    sgd = dr.optim.SGD(0.1)
    late = [dr.optim.Update("one", "second.*", sgd), dr.optim.Update("two", ("first.*", "third.*"), sgd)]
    # torch: one of the variables needed for gradient computation has been modified by an inplace operation
    refused(Shared(), late, "need 'second.weight' as it was before the update by the loss 'one'")
    batch = batches()[0]
    for parts, message in (
        (updates()[:1], "expected each trained parameter in one update, found 'generator.0.weight' in none"),
        (
            [*updates(), dr.optim.Update("critic", "*.0.weight", sgd)],
            "'generator.0.weight' in 'generator' and 'critic'",
        ),
        ([*updates(), dr.optim.Update("critic", "head.*", sgd)], "no trained parameter matches 'head.*'"),
        (updates()[::-1], "expected the loss 'critic' after those of the updates before it"),
        ([], "expected dr.optim.Update objects, found none"),
        ([sgd], "expected dr.optim.Update objects, found SGD"),
    ):
        refused(gan, parts, message, example_batch=batch)
    named = [replace(update, loss=f"{update.loss}s") for update in updates()]
    refused(
        gan,
        named,
        "expected a dict with the loss 'critics', found generator, critic",
        ImportModelError,
        example_batch=batch,
    )
    for option in (
        {"strategy": "1/1/1/2"},
        {"gradient_norm": True},
        {"precision": "fp16"},
        {"deterministic": 2},
        {"metrics": {}},
    ):
        refused(gan, updates(), "expected a single update for", example_batch=batch, **option)
    for given, message in (
        (lambda: dr.optim.Update("a", (), sgd), "expected patterns of parameter names"),
        (lambda: dr.optim.Update("a", "*", torch.optim.SGD), "expected an optimizer such as"),  # type: ignore[arg-type]
        (lambda: dr.optim.Update("a", "*", sgd, 0), "expected every to be 1 or more steps, found 0"),
    ):
        with pytest.raises(DistIRError) as raised:
            given()
        assert message in str(raised.value)
    step = dr.compile_training(gan, optimizer=updates(), example_batch=batch)
    with pytest.raises(DistIRError, match="expected a step with one loss, found several updates"):
        step.evaluate([batch])
