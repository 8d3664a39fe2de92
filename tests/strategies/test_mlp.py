"""The synthetic MLP's training program: over every kind of parallelism it does what torch autograd does."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from distir_relax.analysis.reference import execute_program
from distir_relax.analysis.simulate import simulate_module
from distir_relax.bundle import write_bundle
from distir_relax.compiler import program_bundle
from distir_relax.cost.profile import load_profile
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, inline, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.runtime.session import Session
from distir_relax.strategies import Strategy, mlp_training

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from processes import mpirun

LAYERS, WIDTH, BATCH, RATE = 3, 7, 23, 0.1
STRATEGIES = [
    "1/1/1/1", "1/1/1/5", "2/1/1/1", "3/1/1/2", "1/2/1/1", "1/3/1/3", "1/1/2/3", "1/1/3/4", "2/3/1/2", "3/2/1/1",
    "1/2/3/2", "1/3/2/5", "2/1/3/3", "3/1/2/2", "2/2/2/3", "2/3/3/2", "3/2/3/1",
]  # fmt: skip


@cache
def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {f"w{i}": draw(WIDTH, WIDTH) / WIDTH**0.5 for i in range(LAYERS)}
    return {"x": draw(BATCH, WIDTH), "y": draw(BATCH, WIDTH).abs(), **weights}


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in data().items() if name[0] == "w"}


@cache
def trained(steps: int) -> dict[str, torch.Tensor]:
    """The weights after some steps of SGD, by autograd."""
    parameters = {name: w.requires_grad_() for name, w in weights().items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for _ in range(steps):
        h = data()["x"]
        for w in parameters.values():
            h = (h @ w).relu()
        optimizer.zero_grad()
        (0.5 * (h - data()["y"]).square().sum() / BATCH).backward()
        optimizer.step()
    return {name: w.detach() for name, w in parameters.items()}


def agrees(found: dict[str, torch.Tensor], steps: int) -> None:
    assert set(found) == {f"w{i}" for i in range(LAYERS)}
    for name, expected in trained(steps).items():
        assert (expected - data()[name]).abs().max() > 1e-3, "training changes nothing"
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)


@cache
def program(strategy: str) -> Module:
    return mlp_training(LAYERS, WIDTH, Strategy.parse(strategy), BATCH, "float64", RATE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_program_is_valid_and_is_its_text(strategy: str) -> None:
    module = program(strategy)
    verify(module, check)
    verify(inline(module), check)
    assert parse(print_module(module)) == module


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_step_is_that_of_autograd(strategy: str) -> None:
    agrees(execute_program(program(strategy), data()), 1)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/1/1/5", "3/1/1/2", "1/3/1/3", "1/1/3/4", "2/2/2/3", "2/3/3/2"])
def test_three_steps_by_ranks_that_keep_their_weights(strategy: str) -> None:
    session = Session(program_bundle("mlp", program(strategy), weights()), timeout=30)
    inputs = {name: data()[name] for name in "xy"}
    for step in (1, 2, 3):
        agrees(session(inputs), step)


@pytest.mark.mpirun
@pytest.mark.timeout(120)
def test_steps_by_processes(tmp_path: Path) -> None:
    """Three tensor-parallel ranks on each of two pipeline stages: one step to warm up and two that are timed."""
    write_bundle(program_bundle("mlp", program("1/3/2/5"), weights()), tmp_path / "mlp.dist")
    np.savez(tmp_path / "in.npz", **{name: data()[name].numpy() for name in "xy"})
    done = mpirun(
        6, "-m", "distir_relax", "run", tmp_path / "mlp.dist", "--input", tmp_path / "in.npz", "--output",
        tmp_path / "out.npz", "--repeat", 2, "--timeout", 60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    agrees({name: torch.from_numpy(value) for name, value in np.load(tmp_path / "out.npz").items()}, 3)


def test_what_a_strategy_cannot_do() -> None:
    with pytest.raises(DistIRError, match="3 layers cannot be 4 pipeline stages"):
        mlp_training(3, 5, Strategy(pipeline=4), 8)
    with pytest.raises(DistIRError, match="a batch of 5 has too few samples for 2 data-parallel ranks with 3 micro"):
        mlp_training(3, 5, Strategy(data=2, microbatches=3), 5)


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
    small, large = (mlp_training(6, 4096, Strategy(d, t, 2, 3), 8 * 4096) for d, t in ((1, 1), (128, 16)))
    count = [sum(len(f.ops) for f in m.functions) for m in (small, large)]
    # One all-reduce in each function of a layer or an update.
    assert count[1] - count[0] <= len(large.functions) + 12
    found = simulate_module(large, load_profile("dgx-h100:512"))
    assert (found.devices, len(found.members)) == (4096, 2)


def test_simulated_work_is_that_of_the_layers() -> None:
    """The products of a step: one forwards and two backwards for each layer, whatever the strategy."""
    for strategy in ("1/1/1/1", "2/1/1/3", "1/1/3/4"):
        found = simulate_module(program(strategy), load_profile("dgx2-v100"))
        products = 0
        for event, _ in found.events():
            if event.op.name == "matmul":
                products += sum(len(found.members[c]) for c in event.classes)
        s = Strategy.parse(strategy)
        assert products == 3 * LAYERS * s.microbatches * s.data
