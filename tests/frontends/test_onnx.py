"""ONNX models in: folding, open dims, initialisers, operand forms of old and new opsets, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import ImportModelError, RunError, UnsupportedOpError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.interpret.global_executor import interpret
from distir_relax.layout import Symbol, size_of

Shape = tuple[int | str | None, ...]


def model(
    nodes: list[Any],
    inputs: dict[str, Shape],
    outputs: list[str],
    data: dict[str, Any] | None = None,
    opset: int = 18,
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_value_info(name, onnx.TypeProto()) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (data or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(imported: Imported, *args: Any) -> Any:
    feeds = imported.flatten(args, {})
    return imported.rebuild(interpret(imported.module.main, {**imported.tensors, **feeds}))


def ops(imported: Imported) -> list[str]:
    return [op.name for op in imported.module.main.ops]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def figure_4(weight: np.ndarray[Any, Any], batch: int | str = "batch") -> onnx.ModelProto:
    """The snippet of GPT-2 in figure 4 of the DistIR paper: a rank-3 tensor made rank 2 by its own shape."""
    node = helper.make_node
    nodes = [
        node("Add", ["x", "x"], ["211"]),
        node("Shape", ["211"], ["218"]),
        node("Constant", [], ["219"], value=numpy_helper.from_array(np.array(2))),
        node("Gather", ["218", "219"], ["220"], axis=0),
        node("Unsqueeze", ["220"], ["223"], axes=[0]),
        node("Concat", ["3114", "223"], ["224"], axis=0),
        node("Reshape", ["211", "224"], ["225"]),
        node("Gemm", ["225", "w"], ["y"], name="gemm"),
    ]
    return model(nodes, {"x": (batch, 8, 6)}, ["y"], {"3114": np.array([-1]), "w": weight}, opset=11)


def test_figure_4_of_the_paper_folds_to_one_reshape() -> None:
    weight = normal(6, 5)
    imported = import_onnx(figure_4(weight), {"x": (3, 8, 6)})
    assert ops(imported) == ["add", "reshape", "matmul"]
    assert [str(op.results[0].type) for op in imported.module.main.ops][1:] == ["f32[24,6]", "f32[24,5]"]
    x = normal(3, 8, 6)
    torch.testing.assert_close(run(imported, x), torch.from_numpy((2 * x).reshape(24, 6) @ weight))


def test_figure_4_sharded_by_the_name_of_its_initialiser() -> None:
    weight, x = normal(6, 5), torch.from_numpy(normal(3, 8, 6))
    plan = dr.compile(
        figure_4(weight), input_shapes={"x": (3, 8, 6)}, shardings={"w": "S[0]"}, mesh=dr.DeviceMesh((4,), ("tp",))
    )
    assert 'parameter %w: R.DTensor((6, 5), "float32", "mesh[0]", "S[0: 2|2|1|1]")' in plan.text("sharded")
    torch.testing.assert_close(plan(x), (2 * x).reshape(24, 6) @ torch.from_numpy(weight))


def test_a_chain_of_shapes_that_expands_and_slices() -> None:
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "zero", "one"], ["rows"]),
        node("Concat", ["rows", "four"], ["wide"], axis=0),
        node("ConstantOfShape", ["wide"], ["ones"], value=numpy_helper.from_array(np.array([1.0], np.float32))),
        node("Squeeze", ["rows", "zero"], ["n"]),
        node("Range", ["start", "n", "step"], ["count"]),
        node("Cast", ["count"], ["numbers"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["numbers", "one"], ["column"]),
        node("Expand", ["column", "wide"], ["grid"]),
        node("Mul", ["grid", "ones"], ["table"]),
        node("Add", ["x", "table"], ["y"]),
    ]
    data = {"zero": np.array([0]), "one": np.array([1]), "four": np.array([4]), "start": 0, "step": 1}
    imported = import_onnx(model(nodes, {"x": ("n", 4)}, ["y"], data), {"x": (5, 4)})
    assert ops(imported) == ["add"]
    assert [i.role for i in imported.module.main.inputs] == ["input", "constant"]
    x = normal(5, 4)
    torch.testing.assert_close(run(imported, x), torch.from_numpy(x + np.arange(5, dtype=np.float32)[:, None]))


@pytest.mark.parametrize("opset", [11, 12, 13, 18, 21])
def test_axes_and_the_like_as_attributes_and_as_operands(opset: int) -> None:
    """Squeeze, Unsqueeze, ReduceSum and Split changed in opset 13, ReduceMean in 18: both forms mean the same."""
    data: dict[str, Any] = {"low": np.float32(-0.5), "k": np.array([3]), "pads": np.array([0, 1, 0, 1])}

    def axes(op: str, inputs: list[str], output: list[str], since: int, key: str, value: list[int], **more: Any) -> Any:
        if opset < since:
            return helper.make_node(op, inputs, output, **{key: value}, **more)
        data[f"{output[0]}_{key}"] = np.array(value)
        return helper.make_node(op, [*inputs, f"{output[0]}_{key}"], output, **more)

    nodes = [
        helper.make_node("Clip", ["x", "low"], ["a"]),
        axes("Unsqueeze", ["a"], ["b"], 13, "axes", [0]),
        axes("Squeeze", ["b"], ["c"], 13, "axes", [0]),
        axes("ReduceSum", ["c"], ["d"], 13, "axes", [-1], keepdims=1),
        axes("ReduceMean", ["c"], ["e"], 18, "axes", [0], keepdims=0),
        axes("Split", ["c"], ["f", "g"], 13, "split", [2, 4], axis=1),
        helper.make_node("TopK", ["g", "k"], ["h", "i"], axis=-1),
        helper.make_node("Pad", ["f", "pads"], ["j"]),
        helper.make_node("Softmax", ["c"], ["l"], axis=1),
    ]
    outputs = ["d", "e", "h", "i", "j", "l"]
    imported = import_onnx(model(nodes, {"x": (4, 6)}, outputs, data, opset))
    x = normal(4, 6)
    found = run(imported, x)
    c = torch.from_numpy(x).clamp(min=-0.5)
    top = torch.topk(c[:, 2:], 3)
    assert list(found) == outputs
    torch.testing.assert_close(found["d"], c.sum(-1, keepdim=True))
    torch.testing.assert_close(found["e"], c.mean(0))
    torch.testing.assert_close((found["h"], found["i"]), (top.values, top.indices))
    torch.testing.assert_close(found["j"], torch.nn.functional.pad(c[:, :2], (1, 1)))
    torch.testing.assert_close(found["l"], torch.softmax(c, 1))


def test_softmax_of_old_opsets_sees_all_dims_from_its_axis_on() -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=1)]
    x = normal(2, 3, 4)
    whole = torch.softmax(torch.from_numpy(x).reshape(2, 12), 1).reshape(2, 3, 4)
    torch.testing.assert_close(run(import_onnx(model(nodes, {"x": (2, 3, 4)}, ["y"], opset=12)), x), whole)
    alone = torch.softmax(torch.from_numpy(x), 1)
    torch.testing.assert_close(run(import_onnx(model(nodes, {"x": (2, 3, 4)}, ["y"], opset=13)), x), alone)


def test_integers_are_divided_towards_zero() -> None:
    nodes = [helper.make_node("Div", ["x", "two"], ["y"])]
    made = model(nodes, {"x": (4,)}, ["y"], {"two": np.array([2])}, kind=TensorProto.INT64)
    assert run(import_onnx(made), np.array([-3, -1, 1, 3])).tolist() == [-1, 0, 0, 1]


def test_indices_from_the_end_of_a_split_table() -> None:
    """ONNX lets an index count from the end, also where a rank holds a part of the table only."""
    made = model([helper.make_node("Gather", ["t", "i"], ["y"])], {"i": (3,)}, ["y"], {"t": normal(7, 2)}, kind=7)
    plan = dr.compile(made, shardings={"t": "S[0]"}, mesh=dr.DeviceMesh((3,), ("tp",)))
    ids = torch.tensor([-1, 0, -7])
    torch.testing.assert_close(plan(ids), torch.from_numpy(normal(7, 2))[ids])


def test_a_branch_whose_condition_is_known() -> None:
    def branch(op: str) -> Any:
        return helper.make_graph(
            [helper.make_node(op, ["x"], ["r"])], op, [], [helper.make_value_info("r", onnx.TypeProto())]
        )

    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Size", ["s"], ["rank"]),
        helper.make_node("Equal", ["rank", "two"], ["flat"]),
        helper.make_node("If", ["flat"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs")),
    ]
    two = {"two": np.array(2)}
    assert ops(import_onnx(model(nodes, {"x": (2, 3)}, ["y"], two))) == ["negative"]
    assert ops(import_onnx(model(nodes, {"x": (2, 3, 4)}, ["y"], two))) == ["abs"]


def test_an_op_that_the_standard_defines_by_others() -> None:
    """Celu and Mish have no spelling: their functions in the standard are read instead."""
    nodes = [helper.make_node("Celu", ["x"], ["a"], alpha=2.0), helper.make_node("Mish", ["a"], ["y"])]
    x = normal(3, 4)
    expected = torch.nn.functional.mish(torch.celu(torch.from_numpy(x), alpha=2.0))
    torch.testing.assert_close(run(import_onnx(model(nodes, {"x": (3, 4)}, ["y"])), x), expected)


def test_functions_of_the_model_are_read_through() -> None:
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    made = model([helper.make_node("Twice", ["x"], ["y"], domain="mine")], {"x": (3,)}, ["y"])
    made.opset_import.append(helper.make_opsetid("mine", 1))
    made.functions.append(twice)
    assert ops(import_onnx(made)) == ["add"]


def test_functions_of_the_model_have_default_attributes() -> None:
    """Of a function that another one calls, too, and in the branches of an If; a call's own attribute comes first."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    leak, default = helper.make_node("LeakyRelu", ["a"], ["b"]), helper.make_attribute("slope", 0.5)
    leak.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    leaky = helper.make_function("mine", "Leaky", ["a"], ["b"], [leak], opsets, attribute_protos=[default])
    call = helper.make_node("Leaky", ["a"], ["b"], domain="mine")
    call.attribute.append(onnx.AttributeProto(name="slope", ref_attr_name="own", type=onnx.AttributeProto.FLOAT))
    outer = helper.make_function("mine", "Outer", ["a"], ["b"], [call], opsets, attributes=["own"])
    branch = helper.make_graph(
        [helper.make_node("Leaky", ["x"], ["z"], domain="mine")], "branch", [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )  # fmt: skip
    made = model(
        [
            helper.make_node("Outer", ["x"], ["p"], domain="mine"),
            helper.make_node("Leaky", ["x"], ["q"], domain="mine", slope=0.25),
            helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
            helper.make_node("If", ["yes"], ["r"], then_branch=branch, else_branch=branch),
            helper.make_node("Concat", ["p", "q", "r"], ["y"], axis=0),
        ],
        {"x": (3,)}, ["y"],
    )  # fmt: skip
    made.opset_import.append(helper.make_opsetid("mine", 1))
    made.functions.extend([leaky, outer])
    x = normal(3) - 1
    expected = torch.cat([torch.nn.functional.leaky_relu(torch.from_numpy(x), s) for s in (0.5, 0.25, 0.5)])
    torch.testing.assert_close(run(import_onnx(made), x), expected)


@pytest.mark.parametrize(
    "name", ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]
)  # fmt: skip
@pytest.mark.parametrize("noop", [0, 1])
def test_reductions_without_axes(name: str, noop: int) -> None:
    made = model([helper.make_node(f"Reduce{name}", ["x"], ["y"], noop_with_empty_axes=noop)], {"x": (2, 3)}, ["y"])
    x = np.abs(normal(2, 3)) + 0.5
    (expected,) = ReferenceEvaluator(made).run(None, {"x": x})
    torch.testing.assert_close(run(import_onnx(made), x), torch.from_numpy(np.asarray(expected)))


def test_external_data_is_read_and_its_absence_told(tmp_path: Path) -> None:
    weight, path = normal(6, 5), tmp_path / "m.onnx"
    made = figure_4(weight, 2)
    onnx.save(made, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    made = onnx.load(str(path), load_external_data=False)
    assert torch.equal(import_onnx(path).tensors["w"], torch.from_numpy(weight))
    with pytest.raises(ImportModelError, match="in a separate file") as raised:
        import_onnx(made)
    assert "path" in raised.value.hint
    (tmp_path / "m.data").unlink()
    with pytest.raises(ImportModelError, match="data cannot be read"):
        import_onnx(path)


def test_parameters_have_the_name_of_their_node_too() -> None:
    imported = import_onnx(figure_4(normal(6, 5), 2))
    assert imported.names == {"x": "x", "w": "w", "gemm.B": "w"}


def test_quantised_weights_stay_parameters() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    data = {
        "q": np.arange(12, dtype=np.int8).reshape(4, 3),
        "s": np.array([0.5, 1, 2], np.float32),
        "z": np.array([1, 2, 3], np.int8),
    }
    made = model(nodes, {"x": (2, 4)}, ["y"], data)
    plan = dr.compile(made, shardings={"q": "S[1]"}, mesh=dr.DeviceMesh((2,), ("tp",)))
    x = torch.from_numpy(normal(2, 4))
    weight = (torch.from_numpy(data["q"]).float() - torch.tensor([1.0, 2, 3])) * torch.tensor([0.5, 1, 2])
    torch.testing.assert_close(plan(x), x @ weight)
    assert '"int8", "mesh[0]", "S[1: 2|1]"' in plan.text("sharded")


def input_types(imported: Imported) -> list[str]:
    return [str(item.value.type) for item in imported.module.main.inputs]


def test_open_dims_are_symbols_unless_they_are_bound() -> None:
    nodes = [helper.make_node("Concat", ["x", "y"], ["z"], axis=1)]
    made = model(nodes, {"x": ("batch", 3), "y": ("batch", None)}, ["z"])
    assert input_types(import_onnx(made)) == ["f32[batch, 3]", "f32[batch, y_dim1]"]
    assert input_types(import_onnx(made, {"y": (4, 5)})) == ["f32[4,3]", "f32[4,5]"]
    assert input_types(import_onnx(made, dims={"batch": 4})) == ["f32[4,3]", "f32[4, y_dim1]"]
    bounded = import_onnx(made, dims={"batch": (2, 9)}).module.main.outputs[0].value.tensor.shape
    assert bounded[0] == size_of(Symbol("batch", 2, 9))
    with pytest.raises(ImportModelError, match="'batch' of input 'y' is 5, and 4 elsewhere"):
        import_onnx(made, {"x": (4, 3), "y": (5, 3)})
    with pytest.raises(ImportModelError, match=r"'x' is \(batch, 3\), found the shape \(4, 2\)"):
        import_onnx(made, {"x": (4, 2), "y": (4, 3)})
    with pytest.raises(ImportModelError, match="there is no input w"):
        import_onnx(made, {"w": (4, 2)})
    with pytest.raises(ImportModelError, match="the model has no dim 'bach'") as raised:
        import_onnx(made, dims={"bach": 4})
    assert raised.value.hint == "its dims are batch, y_dim1"
    with pytest.raises(ImportModelError, match="made: the model has no dim 'batch'"):
        import_onnx(made, {"x": (4, 3), "y": (4, 3)}, dims={"batch": 4})
    with pytest.raises(ImportModelError, match="dynamic_shapes are for torch models"):
        dr.compile(made, dynamic_shapes={"x": {0: "batch"}})
    any_rank = model([helper.make_node("Abs", ["x"], ["y"])], {"x": (1,)}, ["y"])
    any_rank.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ImportModelError, match="leaves the number of dims of its input 'x' open"):
        import_onnx(any_rank)
    assert input_types(import_onnx(any_rank, {"x": (4, 2)})) == ["f32[4,2]"]


def test_names_of_dims_become_identifiers_or_expressions() -> None:
    shapes = {
        "x": ("batch", "past + seq", "unk__1"),
        "y": ("batch", "seq", "p2o.Dim.0"),
        "z": ("past", "p2o-Dim.0", "lambda"),
    }
    made = model([helper.make_node("Abs", [name], [f"{name}.abs"]) for name in shapes], shapes, ["x.abs"])
    assert input_types(import_onnx(made)) == [
        "f32[batch, past + seq, unk__1]",
        "f32[batch, seq, p2o_Dim_0]",
        "f32[past, p2o_Dim_0_2, dim_lambda]",
    ]
    fixed = import_onnx(made, dims={"past": (0, 7), "seq": 1, "p2o.Dim.0": 5, "dim_lambda": 3})
    assert input_types(fixed) == ["f32[batch, past + 1, unk__1]", "f32[batch, 1, 5]", "f32[past, p2o_Dim_0_2, 3]"]
    equal = import_onnx(made, dims={"p2o-Dim.0": "p2o_Dim_0", "dim_lambda": "past + 2*seq"})
    assert input_types(equal)[1:] == ["f32[batch, seq, p2o_Dim_0]", "f32[past, p2o_Dim_0, past + 2*seq]"]
    for wrong in ("sek", "seq -", "past - seq"):
        with pytest.raises(
            ImportModelError, match=f"expected an expression over other dims for dim_lambda, found '{wrong}'"
        ):
            import_onnx(made, dims={"dim_lambda": wrong})
    bound = import_onnx(made, {"y": (2, 3, 4)})
    assert input_types(bound) == ["f32[2, past + 3, unk__1]", "f32[2,3,4]", "f32[past, p2o_Dim_0, dim_lambda]"]


def test_negative_dims_are_open(tmp_path: Path) -> None:
    """As paddle2onnx writes them: in inputs, in outputs, and in the types of values between."""
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])]
    made = model(nodes, {"x": (-1, 7, None, 5)}, ["y"], {"w": np.ones((5, 3), np.float32)})
    made.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, (-1, 7, -1, 5)))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, (-1, 7, -1, 3)))
    assert input_types(import_onnx(made))[0] == "f32[x_dim0, 7, x_dim2, 5]"
    with pytest.raises(ImportModelError, match=r"'x' is \(\?, 7, \?, 5\), found the shape \(3, 6, 2, 5\)"):
        import_onnx(made, {"x": (3, 6, 2, 5)})
    plan = dr.compile(made, input_shapes={"x": (3, 7, 2, 5)}, shardings={"x": "S[0]"}, mesh=2)
    x = torch.randn(3, 7, 2, 5)
    torch.testing.assert_close(plan(x), x.relu() @ torch.ones(5, 3))
    onnx.save(made, tmp_path / "made.onnx")
    arguments = ["compile", tmp_path / "made.onnx", "-o", tmp_path / "out", "--input-shape", "x=3,7,2,5", "--mesh", "1"]
    assert CliRunner().invoke(app, list(map(str, arguments))).exit_code == 0


def test_errors_name_the_node_and_say_what_to_do(tmp_path: Path) -> None:
    det = model([helper.make_node("Det", ["x"], ["y"], name="/a/det")], {"x": (3, 3)}, ["y"])
    with pytest.raises(UnsupportedOpError, match=r"^made:/a/det: the model uses the ONNX op Det") as raised:
        import_onnx(det)
    assert '@onnx_spelling("Det")' in raised.value.hint
    dynamic = model([helper.make_node("Reshape", ["x", "s"], ["y"])], {"x": (3,), "s": (1,)}, ["y"])
    with pytest.raises(UnsupportedOpError, match=r"Reshape.*: operand 1 is computed at run time"):
        import_onnx(dynamic)
    random = model([helper.make_node("RandomNormal", [], ["y"], shape=[2])], {}, ["y"])
    with pytest.raises(UnsupportedOpError, match="RandomNormal") as raised:
        import_onnx(random)
    assert "draw random numbers outside" in raised.value.hint
    with pytest.raises(UnsupportedOpError, match=r"made:y: the ONNX op NonZero: how many elements") as raised:
        import_onnx(model([helper.make_node("NonZero", ["x"], ["y"])], {"x": (3,)}, ["y"]))
    assert "fixed number of elements" in raised.value.hint
    with pytest.raises(ImportModelError, match="'q' is used before its definition"):
        import_onnx(model([helper.make_node("Neg", ["q"], ["y"])], {"x": (3,)}, ["y"]))
    with pytest.raises(ImportModelError, match="not a valid Transpose"):
        import_onnx(model([helper.make_node("Transpose", ["x"], ["y"], perm=[0, 5])], {"x": (3, 4)}, ["y"]))
    with pytest.raises(UnsupportedOpError, match="input x: found dtype uint16"):
        import_onnx(model([helper.make_node("Neg", ["x"], ["y"])], {"x": (3,)}, ["y"], kind=TensorProto.UINT16))
    (tmp_path / "bad.onnx").write_text("not a model")
    with pytest.raises(ImportModelError, match="not an ONNX model"):
        import_onnx(tmp_path / "bad.onnx")
    with pytest.raises(ImportModelError, match="no such file"):
        dr.compile(tmp_path / "none.onnx")


def test_the_call_is_checked() -> None:
    plan = dr.compile(figure_4(normal(6, 5), 2), shardings={"w": "S[1]"}, mesh=dr.DeviceMesh((2,), ("tp",)))
    x = normal(2, 8, 6)
    assert torch.equal(plan(x), plan(x=x))
    with pytest.raises(RunError, match="takes the inputs x"):
        plan(x, x)
    with pytest.raises(ImportModelError, match="not an example call"):
        dr.compile(figure_4(normal(6, 5)), (x,))
    with pytest.raises(ImportModelError, match="input_shapes are for ONNX"):
        dr.compile(torch.nn.Linear(2, 2), (torch.ones(1, 2),), input_shapes={"input": (1, 2)})


def test_the_command_line_compiles_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, x = tmp_path / "m.onnx", normal(3, 8, 6)
    onnx.save(figure_4(normal(6, 5)), str(path))
    np.savez(tmp_path / "x.npz", x=x)

    def distir(*arguments: object) -> None:
        app([str(a) for a in arguments], standalone_mode=False)

    given = ("compile", path, "--shard", "gemm.B=S[1]", "--mesh", 3, "-o", tmp_path / "m.dist")
    distir(*given, "--input-shape", "x=3,8,6")
    distir("run", tmp_path / "m.dist", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert "m: 3 ranks" in capsys.readouterr().out
    expected = (2 * x).reshape(24, 6) @ normal(6, 5)
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], expected, rtol=1e-5, atol=1e-5)
    distir(*given, "--dim", "batch=1:64", "--backend", "torch")
    distir("run", tmp_path / "m.dist", "-i", tmp_path / "x.npz", "-o", tmp_path / "z.npz")
    np.testing.assert_allclose(np.load(tmp_path / "z.npz")["y"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ImportModelError, match="the model has no dim 'bach'"):
        distir(*given, "--dim", "bach=1:64")
    with pytest.raises(ImportModelError, match="expected NAME=SIZES"):
        distir(*given, "--input-shape", "x=3,a,6")
    with pytest.raises(ImportModelError, match="--ranks 3 is only for functions"):
        distir(*given, "--ranks", 3)
    with pytest.raises(ImportModelError, match="--input-shape is for ONNX files"):
        distir("compile", "model.py:build", "--input-shape", "x=3,8,6", "-o", tmp_path / "m.dist")
