"""The training of an MLP under strategies: over every kind of parallelism it does what torch autograd does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.compiler.training import TrainingStep
from distir_relax.cost.profile import load_profile
from distir_relax.errors import DistIRError
from distir_relax.ir import inline, parse, print_module, verify
from distir_relax.ops import check, lookup
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies import Strategy
from tests.mlp import half_squared_error, perceptron
from tests.mlp import program as on_meta

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from tests.runtime.processes import mpirun

LAYERS, WIDTH, BATCH, RATE = 3, 7, 23, 0.1
STRATEGIES = [
    "1/1/1/1", "1/1/1/5", "2/1/1/1", "3/1/1/2", "1/2/1/1", "1/3/1/3", "1/1/2/3", "1/1/3/4", "2/3/1/2", "3/2/1/1",
    "1/2/3/2", "1/3/2/5", "2/1/3/3", "3/1/2/2", "2/2/2/3", "2/3/3/2", "3/2/3/1",
]  # fmt: skip


@cache
def data() -> dict[str, torch.Tensor]:
    """A batch, and weights by the names of their values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {f"{i}.0.weight": draw(WIDTH, WIDTH) / WIDTH**0.5 for i in range(LAYERS)}
    return {"input": draw(BATCH, WIDTH), "targets": draw(BATCH, WIDTH).abs(), **weights}


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in data().items() if name.endswith("weight")}


@cache
def trained(steps: int) -> dict[str, torch.Tensor]:
    """The weights after some steps of SGD, by autograd."""
    parameters = {name: w.requires_grad_() for name, w in weights().items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for _ in range(steps):
        h = data()["input"]
        for w in parameters.values():
            h = (h @ w.T).relu()
        optimizer.zero_grad()
        (0.5 * (h - data()["targets"]).square().sum() / BATCH).backward()
        optimizer.step()
    return {name: w.detach() for name, w in parameters.items()}


def agrees(found: Mapping[str, torch.Tensor], steps: int) -> None:
    for name, expected in trained(steps).items():
        assert (expected - data()[name]).abs().max() > 1e-3, "training changes nothing"
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)


def compiled(strategy: str) -> TrainingStep:
    model = perceptron(LAYERS, WIDTH, torch.float64, "cpu")
    model.load_state_dict(weights())
    batch = data()["input"], data()["targets"]
    return dr.compile_training(
        model, half_squared_error, optimizer=dr.optim.SGD(lr=RATE), example_batch=batch, strategy=strategy, name="mlp"
    )


@pytest.mark.drawn(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_program_is_valid_and_is_its_text(strategy: str) -> None:
    module = compiled(strategy).plan.modules["distributed"]
    verify(module, check)
    verify(inline(module), check)
    assert parse(print_module(module)) == module


@pytest.mark.drawn(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_steps_by_ranks_are_those_of_autograd(strategy: str) -> None:
    step = compiled(strategy)
    for number in (1, 2, 3):
        step(data()["input"], data()["targets"], timeout=30)
        agrees(step.parameters(), number)


@pytest.mark.mpirun
@pytest.mark.timeout(120)
def test_steps_by_processes(tmp_path: Path) -> None:
    """Three tensor-parallel ranks on each of two pipeline stages: one step to warm up and two that are timed."""
    compiled("1/3/2/5").save(tmp_path / "mlp.dist", backends=("torch",))
    given = {name: data()[name].numpy() for name in ("input", "targets")}
    np.savez(tmp_path / "in.npz", **given, learning_rate=np.float64(RATE))
    done = mpirun(
        6, "-m", "distir_relax", "run", tmp_path / "mlp.dist", "--input", tmp_path / "in.npz", "--output",
        tmp_path / "out.npz", "--repeat", 2, "--timeout", 60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {name: torch.from_numpy(value) for name, value in np.load(tmp_path / "out.npz").items()}
    agrees({name: found[f"{name}.new"] for name in trained(3)}, 3)


def test_strategies_are_read_and_printed() -> None:
    assert Strategy.parse(" 4/2/3/32 ") == Strategy(4, 2, 3, 32)
    assert Strategy(4, 2, 3, 32).devices == 24
    assert str(Strategy(4, 2, 3, 32)) == "4/2/3/32"
    for text in ("4/2/2", "4/2/2/a", "", "4/2/2/-1", "4/2/2/2/2"):
        with pytest.raises(DistIRError, match="expected a strategy D/T/P/K such as 4/2/2/32, found"):
            Strategy.parse(text)
    with pytest.raises(DistIRError, match="degrees of a strategy are at least 1, found 4/0/2/2"):
        Strategy.parse("4/0/2/2")


def test_the_size_of_a_program_does_not_grow_with_its_devices() -> None:
    small, large = (on_meta(6, 4096, f"{d}/{t}/2/3", 3 * 4096) for d, t in ((1, 1), (16, 8)))
    count = [sum(len(f.ops) for f in m.functions) for m in (small, large)]
    # Reductions, in each function of a stage, of each gradient, and of the loss.
    assert count[1] - count[0] <= len(large.functions) + 12
    found = simulate_module(large, load_profile("dgx-h100:32"))
    assert (found.devices, len(found.members)) == (256, 2)


def test_simulated_work_is_that_of_the_layers() -> None:
    """The products of a step: one forwards and two backwards for each layer, whatever the strategy.

    The first layer has no gradient of its input.
    """
    for strategy in ("1/1/1/1", "2/1/1/3", "1/1/3/4"):
        found = simulate_module(on_meta(LAYERS, WIDTH, strategy, BATCH), load_profile("dgx2-v100"))
        products = 0
        for event, _ in found.events():
            if lookup(event.op.name).cost.product:
                products += sum(len(found.members[c]) for c in event.classes)
        s = Strategy.parse(strategy)
        assert products == (3 * LAYERS - 1) * s.microbatches * s.data
