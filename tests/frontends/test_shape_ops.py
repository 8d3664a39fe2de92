"""Ops on shapes of a model's own program: counted at import, in programs only where a profile prices them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import distir_relax as dr
from distir_relax.compiler.inputs import classify_input
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.errors import ImportModelError
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.frontends.shape_ops import with_shape_ops
from distir_relax.frontends.torch.importer import import_torch


class Block(nn.Module):
    """A layer whose program has 3 ops on shapes before and 4 after its product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = dr.annotate_shape_ops(torch.tanh(x), 3)
        return dr.annotate_shape_ops(self.inner(y), 4)


class Stack(nn.Module):
    """Five of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def machine(**fields: float) -> Profile:
    return replace(load_profile("dgx-h100"), dispatch=0.0, overhead=1e-6, **fields)  # type: ignore[arg-type]


def source(model: object, strategy: str = "1/1/1/1") -> Source:
    read = classify_input(model).read(CompileOptions(profile=machine()))
    return read.with_strategy(dr.Strategy.parse(strategy))


def test_annotations_are_counted_and_leave_the_program_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(3, 7)
    imported = import_torch(model, (x,))
    assert sum(imported.shape_ops.values()) == 35
    assert not [op for op in imported.module.main.ops if op.name == "shape_ops"]
    torch.testing.assert_close(dr.compile(model, (x,), mesh=1)(x), model(x))
    with pytest.raises(ImportModelError, match="at least 0, found -1"):
        dr.annotate_shape_ops(x, -1)
    assert dr.annotate_shape_ops(x, 1) is x


def test_they_follow_the_values_that_they_are_counted_at() -> None:
    imported = with_shape_ops(import_torch(Stack().eval(), (torch.randn(3, 7),)))
    ops = imported.module.main.ops
    counted = [op for op in ops if op.name == "shape_ops"]
    assert [op.attrs["count"] for op in counted] == [3, 4] * 5
    made = {op.results[0].name: op for op in ops}
    assert all(op.operands[0].name in made for op in counted)
    # Whatever uses a counted value uses it after its ops on shapes.
    before = {op.operands[0].name for op in counted}
    users = [op for op in ops if op.name != "shape_ops" and any(v.name in before for v in op.operands)]
    assert not users
    assert imported.module.main.outputs[0].value == counted[-1].results[0]
    assert with_shape_ops(imported) == imported


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1", "1/1/5/1", "1/1/1/3"])
def test_a_profile_that_prices_them_adds_their_time(strategy: str) -> None:
    model = source((Stack().eval(), (torch.randn(3, 7),)), strategy)
    free, priced = model.simulate(machine()), model.simulate(machine(shape_op=1e-3))
    microbatches = 3 if strategy.endswith("3") else 1
    assert priced.makespan - free.makespan == pytest.approx(35e-3 * microbatches, rel=1e-6)
    found = dr.search(
        (Stack().eval(), (torch.randn(15, 7),)), devices=5, profile=machine(shape_op=1e-3), global_batch=15
    )
    by_strategy = {o.strategy: o.seconds for o in found.outcomes if o.fits}
    assert by_strategy["5/1/1/1"] == pytest.approx(35e-3, rel=0.01)


def test_nodes_of_onnx_that_fold_are_counted_before_what_they_lead_to() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Shape", ["a"], ["s"]),
        helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("v", TensorProto.INT64, [], [0])),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Constant", [], ["axes"], value=helper.make_tensor("w", TensorProto.INT64, [1], [0])),
        helper.make_node("Unsqueeze", ["n", "axes"], ["rows"]),
        helper.make_node("Constant", [], ["rest"], value=helper.make_tensor("u", TensorProto.INT64, [1], [-1])),
        helper.make_node("Concat", ["rows", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Identity", ["b"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 10])],
    )  # fmt: skip
    imported = import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [op.name for op in imported.module.main.ops] == ["nn.relu", "reshape", "nn.relu"]
    assert list(imported.shape_ops.values()) == [7, 1]
    names = [op.name for op in with_shape_ops(imported).module.main.ops]
    assert names == ["nn.relu", "reshape", "shape_ops", "nn.relu", "shape_ops"]
