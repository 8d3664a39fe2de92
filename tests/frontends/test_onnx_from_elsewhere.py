"""ONNX files that somebody made up: an error with the file and the node, the tensor or the field."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from distir_relax.errors import DistIRError
from distir_relax.frontends.onnx.importer import import_onnx


def model() -> onnx.ModelProto:
    """A convolution, a pooling, a reshape by numbers, and a loop."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2, 7, 7))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 27))
    state = helper.make_tensor_value_info("s", TensorProto.FLOAT, (3, 27))
    next_ = helper.make_tensor_value_info("t", TensorProto.FLOAT, (3, 27))
    number = helper.make_tensor_value_info("i", TensorProto.INT64, ())
    go, going = (helper.make_tensor_value_info(name, TensorProto.BOOL, ()) for name in ("go", "going"))
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["going"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "body", [number, go, state], [going, next_],
    )  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["b"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0]),
        helper.make_node("Cast", ["b"], ["c"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["c", "shape"], ["d"], "reshape"),
        helper.make_node("Loop", ["trips", "", "d"], ["y"], "loop", body=body),
    ]
    weights = [
        numpy_helper.from_array(np.ones((9, 2, 3, 3), np.float32), "w"),
        numpy_helper.from_array(np.array([3, -1]), "shape"),
        numpy_helper.from_array(np.array(2), "trips"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def node(m: onnx.ModelProto, name: str) -> Any:
    return next(n for n in m.graph.node if n.name == name)


def attribute(m: onnx.ModelProto, where: str, name: str) -> Any:
    return next(a for a in node(m, where).attribute if a.name == name)


def weight(m: onnx.ModelProto, name: str) -> Any:
    return next(t for t in m.graph.initializer if t.name == name)


def without(m: onnx.ModelProto, where: str, name: str) -> None:
    node(m, where).attribute.remove(attribute(m, where, name))


def test_the_model_as_it_is() -> None:
    assert import_onnx(model()).module.main.outputs[0].value.tensor.shape == (3, 27)


Change = Callable[[onnx.ModelProto], object]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(weight(m, "w"), "raw_data", b"short"), "m.onnx, w: the data is no float (9, 2, 3, 3)"),
        (lambda m: setattr(weight(m, "shape"), "raw_data", b"short"), "m.onnx, shape: the data is no int64 (2,)"),
        (lambda m: setattr(weight(m, "w"), "data_type", 99), "m.onnx, w: there is no element type 99"),
        (lambda m: setattr(weight(m, "w"), "data_type", 0), "m.onnx"),
        (lambda m: setattr(weight(m, "w"), "data_type", TensorProto.STRING), "m.onnx"),
        (lambda m: weight(m, "w").dims.__setitem__(0, -1), "m.onnx, w: no tensor has the dims (-1, 2, 3, 3)"),
        (lambda m: weight(m, "w").dims.__setitem__(0, 2**62), "m.onnx, w: no tensor has the dims"),
        (
            lambda m: m.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_value", 2**62),
            "m.onnx:conv: the node is not a valid Conv",
        ),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77), "there is no element type 77"),
        (lambda m: m.graph.input[0].ClearField("type"), "m.onnx: the input 'x' is not a tensor"),
        (lambda m: m.graph.input.append(m.graph.input[0]), "m.onnx: duplicate input 'x'"),
        (lambda m: m.graph.output.append(m.graph.output[0]), "m.onnx: duplicate output 'y'"),
        (lambda m: setattr(m.graph.output[0], "name", "z"), "'z' is used before its definition"),
        (lambda m: node(m, "conv").input.__setitem__(0, "z"), "m.onnx:conv: 'z' is used before its definition"),
        (lambda m: node(m, "conv").ClearField("input"), "m.onnx:conv"),
        (lambda m: node(m, "conv").input.__delitem__(1), "m.onnx:conv"),
        (lambda m: node(m, "reshape").input.__setitem__(1, ""), "m.onnx:reshape"),
        (lambda m: node(m, "reshape").input.__setitem__(1, "w"), "m.onnx:reshape"),
        (lambda m: without(m, "pool", "kernel_shape"), "m.onnx:pool: the node is not a valid MaxPool: KeyError"),
        (
            lambda m: without(m, "cast", "to"),
            "m.onnx:cast: the model uses the ONNX op Cast, which the op table cannot express",
        ),
        (lambda m: setattr(attribute(m, "cast", "to"), "i", 99), "m.onnx:cast: there is no element type 99 in ONNX"),
        (lambda m: attribute(m, "pool", "kernel_shape").ints.__setitem__(0, 10**12), "m.onnx:pool"),
        (lambda m: attribute(m, "pool", "kernel_shape").ints.__setitem__(0, 0), "m.onnx:pool"),
        (lambda m: attribute(m, "pool", "kernel_shape").ints.__setitem__(0, -3), "m.onnx:pool"),
        (lambda m: attribute(m, "pool", "strides").ints.__setitem__(0, 0), "m.onnx:pool"),
        (lambda m: attribute(m, "pool", "pads").ints.__setitem__(0, 2**62), "m.onnx:pool"),
        (lambda m: attribute(m, "pool", "pads").ints.__delitem__(0), "m.onnx:pool"),
        (lambda m: setattr(attribute(m, "pool", "strides"), "type", 2), "m.onnx:pool"),
        (lambda m: setattr(node(m, "cast"), "op_type", "Kast"), "the ONNX op Kast"),
        (lambda m: setattr(node(m, "cast"), "domain", "a.b"), "the ONNX op a.b::Cast"),
        (lambda m: setattr(m.opset_import[0], "version", 2**40), "m.onnx: there is no version 1099511627776"),
        (lambda m: setattr(m.opset_import[0], "version", -1), "m.onnx: there is no version -1"),
        (lambda m: without(m, "loop", "body"), "m.onnx:loop"),
        (lambda m: weight(m, "trips").CopyFrom(numpy_helper.from_array(np.array(2**60), "trips")), "more than 10,000"),
        (lambda m: attribute(m, "loop", "body").g.ClearField("output"), "m.onnx"),
        (lambda m: m.configuration.add(name="c", num_devices=2**31 - 1), "of at most 1,048,576 devices"),
        (lambda m: m.ClearField("graph"), "m.onnx: expected a model with a graph, found none"),
    ],
)
def test_models_that_are_none(change: Change, message: str, tmp_path: Path) -> None:
    changed = model()
    change(changed)
    onnx.save(changed, str(tmp_path / "m.onnx"))
    with pytest.raises(DistIRError) as raised:
        import_onnx(str(tmp_path / "m.onnx"))
    assert message in str(raised.value)
    assert raised.value.where


@pytest.mark.parametrize("name", [b"conv", b"kernel_shape", b"pool", b"shape"])
def test_names_are_utf_8(name: bytes, tmp_path: Path) -> None:
    content = model().SerializeToString()
    assert name in content
    (tmp_path / "m.onnx").write_bytes(content.replace(name, b"\xff" * len(name), 1))
    with pytest.raises(DistIRError, match=r"m\.onnx \(graph.*\): a name is not UTF-8"):
        import_onnx(str(tmp_path / "m.onnx"))


@pytest.mark.timeout(20)
def test_files_that_are_no_models(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(DistIRError, match="expected a file, found a FIFO"):
        import_onnx(str(tmp_path / "m.onnx"))
    with pytest.raises(DistIRError, match="expected a file, found a device"):
        import_onnx("/dev/zero")
    (tmp_path / "deep.onnx").write_bytes(b"\x3a\x80\x08" * 5000)
    with pytest.raises(DistIRError, match=r"deep\.onnx"):
        import_onnx(str(tmp_path / "deep.onnx"))


@pytest.mark.timeout(30)
def test_no_memory_is_taken_for_numbers_made_up() -> None:
    shape = numpy_helper.from_array(np.array([10**6, 10**6]), "shape")
    y = helper.make_tensor_value_info("y", TensorProto.INT64, None)
    for op in (
        helper.make_node("ConstantOfShape", ["shape"], ["a"]),
        helper.make_node("Expand", ["one", "shape"], ["a"]),
    ):
        one = numpy_helper.from_array(np.ones((1,), np.int64), "one")
        graph = helper.make_graph([op, helper.make_node("Add", ["a", "one"], ["y"])], "g", [], [y], [shape, one])
        with pytest.raises(DistIRError, match="is computed during import, and has more than 2,147,483,648 bytes"):
            import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
