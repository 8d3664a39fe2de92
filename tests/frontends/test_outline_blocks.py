"""Which blocks of a model become a function, and which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import distir_relax as dr
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.frontends.relax import import_relax
from distir_relax.frontends.torch import import_torch
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import Module, inline, parse, print_module, verify
from distir_relax.layout import print_placements
from distir_relax.ops import check

MESH = dr.DeviceMesh((3,), ("tp",))


class Block(torch.nn.Module):
    """A gated product with a residual; `mark` is where the first product's result is to lie."""

    def __init__(self, width: int = 6, inner: int = 17, mark: str = "") -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            torch.nn.Linear(a, b) for a, b in ((width, inner), (width, inner), (inner, width))
        )
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.mark:
            hidden = dr.annotate_sharding(hidden, MESH, self.mark)
        return x + self.down(hidden * torch.tanh(self.gate(x)))


class Stack(torch.nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.relu(x)


def outlined(model: torch.nn.Module, *args: Any) -> Module:
    """The model with its blocks as functions; the same ops written out, the same numbers."""
    return checked(import_torch(model.eval(), args))


def checked(imported: Imported, named: bool = True) -> Module:
    """The same; where blocks have no names, their ops have the places of the first."""
    module = Outline(imported.scopes).run(imported.module)
    verify(module, check)
    assert parse(print_module(module)) == module
    before, after = imported.module.main, inline(module).main
    assert sorted(op.name for op in after.ops) == sorted(op.name for op in before.ops)
    if named:
        assert sorted(op.location for op in after.ops) == sorted(op.location for op in before.ops)
    torch.manual_seed(1)
    inputs = {i.value.name: torch.randn(i.value.tensor.shape) for i in before.inputs if i.role == "input"}
    inputs |= imported.tensors
    expected, found = interpret(before, inputs), interpret(module, inputs)
    assert any(tensor.abs().max() > 0 for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    return module


def calls(module: Module) -> list[str]:
    return [op.callee for op in module.main.ops if op.callee]


def test_equal_blocks_are_one_function() -> None:
    module = outlined(Stack(*(Block() for _ in range(5))), torch.randn(3, 6))
    assert [f.name for f in module.functions] == ["main", "block"]
    assert calls(module) == ["block"] * 5
    assert [op.name for op in module.main.ops if not op.callee] == ["nn.relu"]
    assert [op.location for op in module.main.ops if op.callee] == [f"blocks.{i}" for i in range(5)]
    block = module.function("block")
    assert [i.value.name for i in block.inputs] == [
        "x", "up.weight", "up.bias", "gate.weight", "gate.bias", "down.weight", "down.bias"
    ]  # fmt: skip
    assert [i.role for i in block.inputs] == ["input", *["parameter"] * 6]
    assert block.ops[0].location.startswith("up, test_outline_blocks.py:")


def test_blocks_of_other_sizes_are_functions_of_their_own() -> None:
    module = outlined(Stack(Block(), Block(inner=5), Block(), Block(inner=5), Block(inner=7)), torch.randn(3, 6))
    assert calls(module) == ["block", "block_1", "block", "block_1"]
    assert len(module.main.ops) == 4 + len(module.function("block").ops) + 1


def test_a_block_annotated_otherwise_stays_apart() -> None:
    marks = ["S[1]", "S[1]", "R", "S[1]"]
    module = outlined(Stack(*(Block(mark=mark) for mark in marks)), torch.randn(3, 6))
    assert calls(module) == ["block"] * 3
    assert [print_placements(op.placements) for op in module.main.ops if op.name == "annotate_sharding"] == ["R"]


def test_a_block_that_occurs_once_stays_where_it_is() -> None:
    assert len(outlined(Stack(Block()), torch.randn(3, 6)).functions) == 1
    assert len(outlined(Stack(*(torch.nn.Linear(6, 6) for _ in range(4))), torch.randn(3, 6)).functions) == 1


def test_one_module_called_again_is_a_function() -> None:
    block = Block()

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.layers[0](x)
            return x

    module = outlined(Again(), torch.randn(3, 6))
    assert calls(module) == ["block"] * 3
    assert len({op.operands[1:] for op in module.main.ops}) == 1


def test_blocks_within_blocks_that_differ_are_found() -> None:
    stages = [torch.nn.Sequential(Block(), Block()), torch.nn.Sequential(Block(), Block(), Block(inner=5))]
    module = outlined(Stack(*stages), torch.randn(3, 6))
    assert calls(module) == ["block"] * 4


def test_what_one_block_gives_to_others_all_do() -> None:
    class Skip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Wide() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, first = self.blocks[0](x)
            x, _ = self.blocks[1](x)
            x, last = self.blocks[2](x)
            return x + first - last

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wave = torch.sin(x)
            return self.block(wave), wave

    module = outlined(Skip(), torch.randn(3, 6))
    assert calls(module) == ["wide"] * 3
    assert [len(op.results) for op in module.main.ops if op.callee] == [2] * 3


def test_a_block_that_is_left_and_entered_again_is_none() -> None:
    class Torn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = torch.nn.ModuleList(Half() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = [half.first(x) for half in self.halves]
            joined = torch.cat(a, 1).sum(1, keepdim=True)
            return self.halves[0].second(a[0] * joined) + self.halves[1].second(a[1] * joined)

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), Part()

    module = outlined(Torn(), torch.randn(3, 6))
    assert len(module.functions) == 3
    assert sorted(calls(module)) == ["part", "part", "part_1", "part_1"]


def _exported(tmp_path: Path, named: bool) -> Imported:
    path = tmp_path / "stack.onnx"
    model = Stack(*(Block() for _ in range(3))).eval()
    torch.onnx.export(model, (torch.randn(3, 6),), str(path), input_names=["x"], opset_version=18, dynamo=False)
    proto = onnx.load(str(path))
    for node in proto.graph.node:
        assert node.name.startswith("/")
        node.name = node.name if named else ""
    return import_onnx(proto)


def test_the_names_of_onnx_nodes_tell_blocks(tmp_path: Path) -> None:
    module = checked(_exported(tmp_path, named=True))
    assert calls(module) == ["block"] * 3
    places = [op.location for op in module.main.ops if op.callee]
    assert [place.split(":")[1] for place in places] == [f"/blocks.{i}" for i in range(3)]
    assert {op.location.split("/")[0] for op in module.function("block").ops} >= {"up", "gate", "down"}


def test_equal_ops_again_and_again_tell_blocks(tmp_path: Path) -> None:
    module = checked(_exported(tmp_path, named=False), named=False)
    assert calls(module) == ["block"] * 3
    assert [op.name for op in module.main.ops if not op.callee] == ["nn.relu"]


@pytest.mark.parametrize("count", [2, 5])
def test_blocks_of_a_relax_program_are_found(count: int) -> None:
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    program = torch.export.export(Stack(*(Block() for _ in range(count))).eval(), (torch.randn(3, 6),))
    mod, params = relax.frontend.detach_params(from_exported_program(program, keep_params_as_input=True))
    module = checked(import_relax(mod, params=params["main"]), named=False)
    assert calls(module) == ["block"] * count


def test_blocks_of_unlike_numbers_stay_apart() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.block, self.by = Block(), by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) * self.by

    module = outlined(Stack(Scaled(0.0), Scaled(0.0), Scaled(-0.0), Scaled(3.0), Block()), torch.randn(3, 6))
    assert calls(module) == ["scaled", "scaled", "block", "block"]
    assert [op.attrs["value"] for op in module.main.ops if op.name == "constant"] == [-0.0, 3.0]
