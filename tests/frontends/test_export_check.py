"""What is read in is compared with the model; models without data, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distir_relax import DeviceMesh, compile, simulate
from distir_relax.errors import BundleError, ImportModelError

MESH = DeviceMesh((3,))


class Block(torch.nn.Module):
    """A block that `torch.export` reads as another, when `wrong`."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.linear = torch.nn.Linear(5, 5)
        self.scale = Scale(wrong)

    def forward(self, x: torch.Tensor) -> Any:
        return {"rows": torch.relu(self.scale(self.linear(x)))}


class Scale(torch.nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.wrong and torch.compiler.is_exporting() else x


class Model(torch.nn.Module):
    """Three blocks, of which the second may be read wrongly; it counts its calls."""

    def __init__(self, wrong: bool = True) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(wrong and i == 1) for i in range(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.add_(1)
        for block in self.blocks:
            x = block(x)["rows"]
        return x + self.calls + self.offset, x.argmax(-1)


SHARDINGS = {"blocks.*.linear.weight": "S[0]"}


def test_the_first_module_that_was_read_wrongly_is_named() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(7, 5)
    with pytest.raises(
        ImportModelError, match=r"torch.export has exported the model incorrectly.* differ by"
    ) as raised:
        compile(model, (x,), shardings=SHARDINGS, mesh=MESH)
    assert raised.value.where.startswith("blocks.1.scale, the first module")
    assert "check_import=False" in raised.value.hint
    assert int(model.calls) == 0
    compile(model, (x,), shardings=SHARDINGS, mesh=MESH, check_import=False)


def test_a_model_that_was_read_rightly_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Model(wrong=False), torch.randn(7, 5)
    plan = compile(model, (x,), shardings=SHARDINGS, mesh=MESH)
    assert int(model.calls) == 0
    for found, expected in zip(plan(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_model_on_the_meta_device_compiles_and_simulates(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    plan = compile(model, (torch.empty(7, 5, device="meta"),), shardings=SHARDINGS, mesh=MESH)
    real = compile(Model(), (torch.randn(7, 5),), shardings=SHARDINGS, mesh=MESH, check_import=False)
    assert simulate(plan, profile="dgx-h100").makespan == simulate(real, profile="dgx-h100").makespan
    with pytest.raises(BundleError, match="has no data: it is on the meta device"):
        plan.save(tmp_path / "plan.dist")
    assert not (tmp_path / "plan.dist").exists()


def without_data(model: Model) -> Model:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"))
    return model


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    real, x = Model(wrong=False), torch.randn(7, 5)
    weights = {name: p.detach().double() for name, p in real.named_parameters()}
    first = {name: weights.pop(name) for name in list(weights)[:2]}
    save_file(first, tmp_path / "model-1-of-2.safetensors")
    save_file(weights, tmp_path / "model-2-of-2.safetensors")
    hollow = without_data(Model(wrong=False))
    plan = compile(hollow, (x,), shardings=SHARDINGS, mesh=MESH, checkpoint=tmp_path)
    assert all(p.is_meta for p in hollow.parameters())
    for found, expected in zip(plan(x), real(x), strict=True):
        torch.testing.assert_close(found, expected)
    plan.save(tmp_path / "plan.dist")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"blocks.0.linear.weight": torch.zeros(5, 5)}, "has no data for blocks.0.linear.bias, .* and 2 more"),
        (
            {"blocks.0.linear.weight": torch.zeros(5, 4)},
            r"expected \(5, 5\) for 'blocks.0.linear.weight', found \(5, 4\)",
        ),
        (None, "there is no such checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, weights: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    if weights is not None:
        save_file(weights, path)
    with pytest.raises(ImportModelError, match=message):
        compile(without_data(Model(wrong=False)), (torch.randn(7, 5),), mesh=MESH, shardings=SHARDINGS, checkpoint=path)
