"""Low-rank adapters on a frozen base (`examples/adapters.py`), against torch on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli.app import app
from distir_relax.support.user_function import import_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "adapters.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return import_file(EXAMPLE)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/2/1/1", "3/1/1/2,zero=3", "2/2/2/1,zero=1"])
def test_adapters_are_trained_alone_and_merged(example: ModuleType, strategy: str, tmp_path: Path) -> None:
    """The state and the checkpoints have nothing of the base; merged weights are torch's."""
    torch.manual_seed(0)
    base = example.Digits().double()
    model = example.adapt(copy.deepcopy(base))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    items = [
        (torch.randn(13, 8, 8, generator=generator).double(), torch.randint(10, (13,), generator=generator))
        for _ in range(4)
    ]
    step = dr.compile_training(
        model, F.cross_entropy, optimizer=dr.optim.AdamW(0.05), example_batch=items[0], strategy=strategy
    )
    dr.train(step, items, steps=4, checkpoint=tmp_path / "ck")
    expected = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=0.05)
    for x, y in items:
        optimizer.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        optimizer.step()

    saved = load_file(tmp_path / "ck" / "step-00000004" / "state.safetensors")
    state = {f"{name}.{label}" for name in trained for label in ("exp_avg", "exp_avg_sq")}
    assert set(saved) == trained | state | {"optimizer.step"}
    file = tmp_path / "adapters.safetensors"
    done = CliRunner().invoke(app, ["export-checkpoint", str(tmp_path / "ck"), "-o", str(file), "--trained"])
    assert done.exit_code == 0, done.output
    adapters = load_file(file)
    assert set(adapters) == trained
    found = example.adapt(copy.deepcopy(base))
    found.load_state_dict(adapters, strict=False)
    found, expected = example.merge(found), example.merge(expected)
    assert [*found.state_dict()] == [*base.state_dict()]
    assert not torch.equal(found.blocks[0].up.weight, base.blocks[0].up.weight)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-9)
    # The adapters are loaded again, and compute as the merged model does.
    step.load_parameters({name: torch.zeros_like(x) for name, x in adapters.items()}, strict=False)
    step.load_parameters(file, strict=False)
    with torch.no_grad():
        loss = float(F.cross_entropy(found(items[0][0]), items[0][1]))
    assert step(*items[0]) == pytest.approx(loss, rel=1e-9)
