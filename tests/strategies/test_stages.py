"""Models cut into stages: where, what stays outside, and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.frontends.model import import_model
from distir_relax.frontends.outline import Outline
from distir_relax.ir import Module, verify
from distir_relax.ops import check
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.stages import CutStages
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
    found = CutStages(count, machine(), scopes=imported.scopes, separate=microbatches > 1, **options).run(module)
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
        (3, {"boundaries": ("layers.3", "layers.1")}, "'layers.1' would be empty: it is not behind 'layers.3'"),
        (2, {"boundaries": ("embed",)}, "would be empty: it is not behind the beginning of the model"),
        (2, {"boundaries": ("layers.1.0",)}, "no stage can begin with 'layers.1.0'"),
        (99, {}, "ops with weights that follow each other, which cannot be 99 stages"),
    ],
)
def test_what_cannot_be_cut_says_why(count: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dr.DistIRError) as raised:
        cut(Layers(), count, **options)
    assert message in raised.value.message
    if "no stage" in message:
        assert "layers.0" in (raised.value.hint or "")
