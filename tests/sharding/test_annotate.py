"""Annotations: free in eager, checked at the call, by name from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import tensor as dtensor

from distir_relax.errors import AnnotationError, PlacementError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import Module, verify
from distir_relax.layout import Cut, DeviceMesh, R, Shard, print_placements
from distir_relax.layout.validate import validate_placements
from distir_relax.ops import check
from distir_relax.sharding.annotate import annotate_sharding
from distir_relax.sharding.named_annotations import ApplyShardings

MESH = DeviceMesh((2,), ("tp",))
GRID = DeviceMesh((2, 3), ("dp", "tp"))


def test_it_is_free_in_eager() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    assert annotate_sharding(x, MESH, "S[0]") is x
    with torch.inference_mode():
        assert annotate_sharding(x, MESH, "S[0]") is x


def test_it_vanishes_under_torch_compile() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return annotate_sharding(x, MESH, "S[0]") * 2

    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(double, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(4)), torch.full((4,), 2.0))
    assert "annotate" not in str(seen[0].graph)


@pytest.mark.parametrize(
    ("placement", "mesh", "expected"),
    [
        ("S[0]", MESH, (Shard(0),)),
        ("S[-1]", MESH, (Shard(1),)),
        ("S[1: 4|2]", MESH, (Shard(1, Cut.of(4, 2)),)),
        ("R, S[1: 2|0|4]", GRID, (R, Shard(1, Cut.of(2, 0, 4)))),
        (Shard(0), MESH, (Shard(0),)),
        ([Shard(0), "R"], GRID, (Shard(0), R)),
        ("S[0], S[-2]", GRID, (Shard(0), Shard(0))),
        ("S[1: 4|2], S[1]", GRID, (Shard(1, Cut.of(4, 2)), Shard(1))),
        ([dtensor.Shard(0), dtensor.Replicate()], GRID, (Shard(0), R)),
    ],
)
def test_spellings(placement: object, mesh: DeviceMesh, expected: Any) -> None:
    assert validate_placements(placement, mesh, (4, 6)) == expected


@pytest.mark.parametrize(
    ("placement", "mesh", "message"),
    [
        ("T[0]", MESH, "'T[0]' is not a placement"),
        ("S[7]", MESH, "S[7] names dim 7, but a tensor of shape (4, 6) has dims 0 to 1"),
        ("S[-3]", MESH, "S[-3] names dim -3"),
        ("S[0]", GRID, "expected one placement for each of the 2 mesh axes (dp, tp), found 1"),
        ("S[0], R", MESH, "expected one placement for each of the 1 mesh axes (tp), found 2"),
        ("S[1: 3|4]", MESH, "the sizes of S[1: 3|4] add up to 7, but dim 1 of shape (4, 6) has 6"),
        ("S[1: 2|2|2]", MESH, "lists 3 sizes, but the mesh axis has 2 devices"),
        ("S[1: 4|2], S[1: 2|2|2]", GRID, "of S[1: 2|2|2] do not divide each part of S[1: 4|2] separately"),
    ],
)
def test_illegal_placements_are_refused_at_the_call(placement: str, mesh: DeviceMesh, message: str) -> None:
    x = torch.ones(4, 6)
    with pytest.raises(PlacementError) as raised:
        annotate_sharding(x, mesh, placement)  # the call
    assert message in raised.value.message
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i + 1 for i, line in enumerate(lines) if line.endswith("# the call")]
    assert raised.value.where == f"{Path(__file__).name}:{number}"


def test_the_mark_is_differentiable() -> None:
    class Marked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return annotate_sharding(x, MESH, "S[0]") * 3

    x = torch.ones(4, requires_grad=True)
    torch.export.export(Marked(), (x,), strict=False).module()(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 3.0))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.head = nn.Linear(4, 3)
        self.tied = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def tower() -> Imported:
    return import_torch(Tower(), (torch.ones(2, 4),))


def apply(imported: Imported, shardings: dict[str, str]) -> Module:
    return ApplyShardings(shardings, MESH, imported.names).run(imported.module)


def marks(module: Module) -> dict[str, tuple[str, str]]:
    ops = [op for op in module.main.ops if op.name == "annotate_sharding"]
    return {op.operands[0].name: (print_placements(op.placements), op.location) for op in ops}


def test_shardings_by_name(tower: Imported) -> None:
    shardings = {"layers.*.weight": "S[-2]", "x": "R", "head.weight": "S[0: 3|0]"}
    sharded = apply(tower, shardings)
    assert sharded.meshes == (MESH,)
    assert marks(sharded) == {
        "x": ("R", 'shardings["x"]'),
        "layers.0.weight": ("S[0]", 'shardings["layers.*.weight"]'),
        "layers.1.weight": ("S[0]", 'shardings["layers.*.weight"]'),
        "tied": ("S[0: 3|0]", 'shardings["head.weight"]'),
    }
    verify(sharded, check)
    marked = set(marks(sharded))
    others = [op for op in sharded.main.ops if op.name != "annotate_sharding"]
    assert not marked & {v.name for op in others for v in op.operands}

    inputs = {**tower.tensors, "x": torch.randn(2, 4)}
    before, after = interpret(tower.module.main, inputs), interpret(sharded.main, inputs)
    torch.testing.assert_close(after["output"], before["output"])


def test_no_shardings_change_nothing(tower: Imported) -> None:
    assert apply(tower, {}).functions == tower.module.functions


def test_a_pattern_that_matches_nothing_lists_near_misses(tower: Imported) -> None:
    with pytest.raises(AnnotationError, match=r"'layer\.\*\.weight' matches no input and no parameter") as raised:
        apply(tower, {"layer.*.weight": "S[0]"})
    assert "layers.0.weight" in raised.value.hint


def test_patterns_that_disagree_are_both_named(tower: Imported) -> None:
    with pytest.raises(AnnotationError) as raised:
        apply(tower, {"layers.*": "S[0]", "layers.1.*": "S[1]"})
    for text in ("layers.1.weight", "'layers.*'", "S[0]", "'layers.1.*'", "S[1]"):
        assert text in raised.value.message
    apply(tower, {"layers.*": "S[0]", "layers.1.*": "S[-2]"})


def test_a_placement_that_does_not_fit_names_pattern_and_parameter(tower: Imported) -> None:
    with pytest.raises(PlacementError, match="S\\[1\\] names dim 1") as raised:
        apply(tower, {"head.*": "S[1]"})
    assert raised.value.where == 'shardings["head.*"], head.bias'


def test_a_mesh_unlike_the_models_own() -> None:
    class Marked(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(annotate_sharding(x, MESH, "R"))

    imported = import_torch(Marked(), (torch.ones(2, 4),))
    with pytest.raises(AnnotationError, match="one mesh for all annotations"):
        ApplyShardings({"head.weight": "R, R"}, GRID, imported.names).run(imported.module)
    assert apply(imported, {"head.weight": "S[0]"}).meshes == (MESH,)
