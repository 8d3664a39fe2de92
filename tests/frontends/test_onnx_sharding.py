"""ONNX's own multi-device metadata, read and written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import distir_relax as dr
from distir_relax.frontends.onnx.multi_device_metadata import read_sharding

MESH = dr.DeviceMesh((2,), ("tp",))


def mlp(wide: int = 7) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    weights = {"a": generator.normal(size=(4, wide)), "b": generator.normal(size=(wide, 4))}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"], name="up"),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("MatMul", ["r", "b"], ["y"], name="down"),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 4))],
        [numpy_helper.from_array(data.astype(np.float32), name) for name, data in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=11)


def annotated(
    tensor: str, node: int, *blocks: tuple[int, int], axis: int = 1, devices: Any = (0, 1)
) -> onnx.ModelProto:
    """The model with one layout, its dim cut into blocks (size, shards); a size of 0 is left open."""
    model = mlp()
    model.configuration.add(name="two", num_devices=2)
    chosen = model.graph.node[node].device_configurations.add(configuration_id="two", pipeline_stage=node)
    spec = chosen.sharding_spec.add(tensor_name=tensor, device=devices)
    if blocks:
        dim = spec.sharded_dim.add(axis=axis)
        for size, shards in blocks:
            dim.simple_sharding.add(num_shards=shards, **({"dim_value": size} if size else {}))
    return model


def expected(x: torch.Tensor, model: onnx.ModelProto) -> torch.Tensor:
    a, b = (torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer)
    return torch.relu(x @ a) @ b


def layout(plan: dr.Plan, name: str) -> str:
    return next(str(i.value.type) for i in plan.modules["sharded"].main.inputs if i.value.name == name)


@pytest.mark.parametrize(("tensor", "node", "axis"), [("a", 0, 1), ("a", 0, -1), ("h", 0, 1), ("r", 2, 1), ("b", 2, 0)])
def test_a_layout_of_any_tensor_is_an_annotation(tensor: str, node: int, axis: int) -> None:
    model = annotated(tensor, node, (0, 2), axis=axis)
    onnx.checker.check_model(model)
    plan = dr.compile(model)
    assert plan.mesh == MESH
    assert layout(plan, "a").endswith('"S[1: 4|3]")')
    assert layout(plan, "b").endswith('"S[0: 4|3]")')
    x = torch.randn(3, 4)
    torch.testing.assert_close(plan(x), expected(x, model))


def test_blocks_are_cut_whole() -> None:
    model = annotated("a", 0, (1, 1), (7, 2))
    assert read_sharding(model).specs == {"h": {"a": "S[1: 4|3]"}}
    heads = annotated("a", 0, (3, 1), (5, 2), (4, 1))
    assert read_sharding(heads).specs == {"h": {"a": "S[1: 3*(12|8)]"}}
    assert read_sharding(heads).stages == {"h": 0}


def test_a_tensor_that_all_devices_hold() -> None:
    model = annotated("x", 0, devices=(-1,))
    group = model.graph.node[0].device_configurations[0].sharding_spec[0].index_to_device_group_map.add(key=-1)
    group.value.extend([0, 1])
    assert read_sharding(model).specs == {"h": {"x": "R"}}
    assert layout(dr.compile(model), "x").endswith('"R")')


def test_what_is_written_is_read_again() -> None:
    model = annotated("r", 2, (0, 2))
    plan = dr.compile(model)
    written = plan.to_onnx_sharding(model)
    onnx.checker.check_model(written)
    assert [c.num_devices for c in written.configuration] == [2]
    assert not mlp().graph.node[0].device_configurations
    assert read_sharding(written).specs == {
        "h": {"x": "R", "a": "S[1: 4|3]", "h": "S[1: 4|3]"},
        "r": {"h": "S[1: 4|3]", "r": "S[1: 4|3]"},
        "y": {"r": "S[1: 4|3]", "b": "S[0: 4|3]", "y": "R"},
    }
    assert read_sharding(written).stages == {"y": 2}
    again = dr.compile(written)
    kinds = [op.name for op in again.modules["distributed"].main.ops]
    assert kinds == [op.name for op in plan.modules["distributed"].main.ops]
    x = torch.randn(3, 4)
    torch.testing.assert_close(again(x), expected(x, model))


def test_another_mesh_takes_the_place_of_the_models_own() -> None:
    model = annotated("a", 0, (0, 2))
    plan = dr.compile(model, mesh=dr.DeviceMesh((3,), ("tp",)))
    assert layout(plan, "a").endswith('"S[1: 3|2|2]")')


def test_what_cannot_be_read_or_written_is_an_error() -> None:
    with pytest.raises(dr.DistIRError, match=r"mlp:up, a: expected devices 0 to 1 in order"):
        dr.compile(annotated("a", 0, (0, 2), devices=(1, 0)))
    with pytest.raises(dr.DistIRError, match="expected 2 shards, one a device, found 3"):
        dr.compile(annotated("a", 0, (0, 3)))
    with pytest.raises(dr.DistIRError, match="sizes of all blocks"):
        dr.compile(annotated("a", 0, (0, 2), (4, 1)))
    uneven = dr.compile(mlp(), shardings={"a": "S[1: 6|1]"}, mesh=MESH)
    with pytest.raises(dr.DistIRError, match=r"cannot express S\[1: 6\|1\]"):
        uneven.to_onnx_sharding(mlp())
    square = dr.compile(mlp(), shardings={"a": "S[1], R"}, mesh=dr.DeviceMesh((2, 2), ("tp", "dp")))
    with pytest.raises(dr.DistIRError, match="mesh of one axis"):
        square.to_onnx_sharding(mlp())
