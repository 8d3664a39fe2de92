"""The place of an op is the path of its module and the line of its call, wherever a place is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.torch import import_torch
from distir_relax.ir import parse, print_module

HERE = Path(__file__).name
SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()
MESH = dr.DeviceMesh((3,), ("tp",))


def line_of(mark: str) -> str:
    """The line of this file that ends in ``# mark``."""
    return f"{HERE}:{next(n for n, line in enumerate(SOURCE, 1) if line.endswith(f'# {mark}'))}"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 17), torch.nn.Linear(17, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = dr.annotate_sharding(self.up(x), MESH, "S[1]")  # up
        hidden = torch.tanh(hidden)  # tanh
        return x + self.down(hidden)  # down


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            return torch.relu(x)  # relu


@pytest.fixture(scope="module")
def plan() -> dr.Plan:
    return dr.compile(Model().eval(), (torch.randn(5, 6),), outline=False)


def test_an_op_has_the_path_of_its_module(plan: dr.Plan) -> None:
    ops = plan.modules["global"].main.ops
    places = {op.location for op in ops}
    for i in range(2):
        assert f"blocks.{i}.up, {line_of('up')}" in places
        assert f"blocks.{i}.down, {line_of('down')}" in places
        assert f"blocks.{i}, {line_of('tanh')}" in places
    assert [op.location for op in ops if op.name == "nn.relu"] == [line_of("relu")]
    assert [op.location for op in ops if op.name == "annotate_sharding"] == [
        f"blocks.{i}, {line_of('up')}" for i in range(2)
    ]


@pytest.mark.parametrize("stage", ["global", "sharded", "distributed", "ranked"])
def test_the_text_is_read_back(plan: dr.Plan, stage: str) -> None:
    text = plan.text(stage)
    assert f"  # blocks.1.down, {line_of('down')}" in text
    assert print_module(parse(text)) == print_module(plan.modules[stage])


def test_every_step_of_a_rank_says_its_module(plan: dr.Plan) -> None:
    program = plan.bundle(("torch",)).programs["programs/main_0.py"]
    steps = program[program.index("STEPS") : program.index("}")]
    assert steps.count(f"down, {line_of('down')}") == 2


def test_a_reason_says_the_module_of_its_annotation(plan: dr.Plan) -> None:
    assert f"from the annotation at blocks.0, {line_of('up')}" in plan.text("sharded")


def test_an_error_says_the_module() -> None:
    class Sorted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0]  # unsupported

    with pytest.raises(UnsupportedOpError) as raised:
        import_torch(torch.nn.Sequential(torch.nn.Linear(3, 3), Sorted()), (torch.randn(5, 3),))
    assert raised.value.where == f"1, {line_of('unsupported')}"
