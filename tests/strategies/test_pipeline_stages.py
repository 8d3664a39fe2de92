"""Models cut into stages: where, what stays outside, and what cannot be cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.frontends.import_model import import_model
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Module, verify
from distir_relax.ops import check
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.pipeline_stages import CutStages
from distir_relax.strategies.strategy import Strategy
from tests.machines import machine


class Layers(nn.Module):
    """Layers behind an embedding, a norm over all samples at the end if there is `together`."""

    def __init__(self, count: int = 5, together: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)) for _ in range(count))
        self.head = nn.Linear(6, 3)
        self.together = together

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        x = x / x.mean(0) if self.together else x
        return F.cross_entropy(self.head(x), labels, ignore_index=2)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 11, (7,)), torch.randint(0, 3, (7,))


def cut(model: nn.Module, count: int, microbatches: int = 3, **options: Any) -> Module:
    imported = import_model(model, example(), None, None, None, False)
    module = Outline(imported.scopes).run(imported.module)
    module = ApplyStrategy(Strategy(microbatches=microbatches)).run(module)
    found = CutStages(count, machine(), scopes=imported.scopes, microbatches=microbatches, **options).run(module)
    verify(found, check)
    return found


def stages(module: Module) -> list[tuple[object, str]]:
    return [(op.attrs["stage"], op.callee) for op in module.main.ops if op.task]


def test_equal_stages_are_one_function() -> None:
    assert stages(cut(Layers(), 3)) == [(0, "stage"), (1, "stage_1"), (2, "stage_2")]
    found = cut(Layers(8), 5, boundaries=("layers.1", "layers.3", "layers.5", "layers.7"))
    assert stages(found) == [(0, "stage"), (1, "stage_1"), (2, "stage_1"), (3, "stage_1"), (4, "stage_2")]


def test_what_brings_samples_together_and_what_is_made_of_inputs_stays_outside() -> None:
    main = cut(Layers(), 3).main
    outside = [op.name for op in main.ops if not op.task]
    # The count of labels, and the mean; not a product.
    assert outside.count("sum") == 2
    assert "divide" in outside
    assert "linear" not in outside
    last = max(i for i, op in enumerate(main.ops) if op.task)
    inside = {v.name for op in main.ops[: last + 1] if op.task for v in op.operands}
    made = {v.name: op for op in main.ops for v in op.results}
    assert all(
        not made[name].task for name in inside if name in made and "float" not in made[name].results[0].tensor.dtype
    )


def test_with_one_microbatch_all_is_in_stages() -> None:
    main = cut(Layers(together=True), 2, microbatches=1).main
    names = [op.name for op in main.ops if not op.task]
    assert "mean" not in names
    assert "linear" not in names


def test_stages_begin_where_the_user_says() -> None:
    found = cut(Layers(), 3, boundaries=("layers.1", "head"))
    calls = {op.callee: op for op in found.main.ops if op.task}
    counts = {name: sum(op.callee == "sequential" for op in found.function(name).ops) for name in calls}
    assert counts == {"stage": 1, "stage_1": 4, "stage_2": 0}


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (3, {"boundaries": ("layers.1", "layer.9")}, "no stage can begin with 'layer.9'"),
        (3, {"boundaries": ("layers.1",)}, "3 stages have 2 boundaries, found 1: layers.1"),
        (3, {"boundaries": ("layers.3", "layers.1")}, "'layers.1' would be empty: it does not follow 'layers.3'"),
        (2, {"boundaries": ("embed",)}, "would be empty: it does not follow the beginning of the model"),
        (2, {"boundaries": ("layers.1.0",)}, "no stage can begin with 'layers.1.0'"),
        (99, {}, "consecutive ops with weights, too few for 99 stages"),
    ],
)
def test_what_cannot_be_cut_says_why(count: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dr.DistIRError) as raised:
        cut(Layers(), count, **options)
    assert message in raised.value.message
    if "no stage" in message:
        assert "layers.0" in (raised.value.hint or "")


class Normed(nn.Module):
    """Samples meet after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def test_where_samples_meet_no_stage_follows() -> None:
    model, x = Normed().train(), torch.randn(7, 6)
    with pytest.raises(dr.DistIRError, match=r"ops with weights before .* joins the microbatches") as raised:
        dr.compile_training(model, optimizer=dr.optim.SGD(lr=0.1), example_batch=x, strategy="1/1/9/3")
    assert "one microbatch" in (raised.value.hint or "")
    for strategy in ("1/1/2/1", "1/1/2/3"):
        step = dr.compile_training(model, optimizer=dr.optim.SGD(lr=0.1), example_batch=x, strategy=strategy)
        expected = Normed().train()
        expected.load_state_dict(model.state_dict())
        assert step(x) == pytest.approx(expected(x).item(), rel=1e-6)


def test_nodes_of_an_onnx_model_are_boundaries(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    x, path = torch.randn(7, 6), tmp_path / "m.onnx"
    torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"])
    plan = dr.compile(path, strategy="1/1/2/3", stages=["/2/Gemm"])
    calls = [op for op in plan.modules["distributed"].main.ops if op.task]
    tasks = {(op.attrs["stage"], op.attrs["microbatch"]) for op in calls}
    assert tasks == {(stage, microbatch) for stage in range(2) for microbatch in range(3)}
    sent = [op.results[0].placed.shape for op in plan.modules["distributed"].main.ops if op.name == "send"]
    assert sent == [(3, 5), (2, 5), (2, 5)]
    torch.testing.assert_close(plan(x), model(x))


def test_a_skip_over_a_stage_and_a_weight_of_two_stages_are_sent() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid, self.last = (nn.Linear(5, 5, bias=False) for _ in range(3))
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x)
            return (self.last(self.mid(first).tanh()) * first).square().mean()

    torch.manual_seed(0)
    model, x = Skips().double(), torch.randn(7, 5, dtype=torch.float64)
    own = copy.deepcopy(model)
    step = dr.compile_training(
        model, optimizer=dr.optim.SGD(lr=0.1), example_batch=x, strategy="1/1/3/3", stages=["mid", "last"]
    )
    sends = [op for op in step.plan.modules["distributed"].main.ops if op.name == "send"]
    pairs = {(op.operands[0].placed.devices[0], op.results[0].placed.devices[0]) for op in sends}
    # Down the stages and back, over the middle one, and the weight and its gradient.
    assert pairs >= {(0, 1), (1, 2), (0, 2), (2, 0), (2, 1), (1, 0)}
    for _ in range(3):
        loss = own(x)
        own.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in own.parameters():
                p -= 0.1 * p.grad
        assert step(x) == pytest.approx(loss.item(), abs=1e-12)
    for name, tensor in step.parameters().items():
        torch.testing.assert_close(tensor, own.get_parameter(name).detach(), rtol=1e-12, atol=1e-12)
