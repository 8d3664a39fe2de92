"""Open dims of ONNX models are symbols: one program gives what onnx's evaluator and torch give at every size."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import distir_relax as dr
from distir_relax.errors import ImportModelError, RunError, UnsupportedOpError
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import inline, parse, print_module, verify
from distir_relax.ir.symbols import specialize
from distir_relax.layout import Guard
from distir_relax.ops import check
from tests.frontends import test_onnx_models as exported

torch.set_num_threads(1)
node = helper.make_node
DATA = {
    **{f"i{n}": np.array([n]) for n in (-1, 0, 1, 2, 3, 5)},
    **{f"n{n}": np.array(n) for n in (-1, 0, 1, 2, 3, 5, 8)},
    "i10": np.array([1, 0]),
    "end": np.array([np.iinfo(np.int64).max]),
    "near": np.array([np.iinfo(np.int64).min]),
    "shape3": np.array([3, 1, 1]),
    "half": np.array(0.5, np.float32),
    "two": np.array(2.0, np.float32),
}


def model(nodes: list[Any], shapes: dict[str, Any], outputs: list[str], kind: int = TensorProto.FLOAT) -> Any:
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()],
        [helper.make_value_info(name, onnx.TypeProto()) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in DATA.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


# Of the shape s = (batch, 6, length): nodes, and their result.
COMPUTATIONS: dict[str, list[Any]] = {
    "gather": [node("Gather", ["s", "n2"], ["y"])],
    "gather from the end": [node("Gather", ["s", "i-1"], ["y"])],
    "gather several": [node("Gather", ["s", "i10"], ["y"])],
    "slice": [node("Slice", ["s", "i1", "end"], ["y"])],
    "reversed": [node("Slice", ["s", "i-1", "near", "i0", "i-1"], ["y"])],
    "concat": [node("Concat", ["s", "i5", "s"], ["y"], axis=0)],
    "split": [node("Split", ["s"], ["a", "b"], num_outputs=2), node("Concat", ["b", "a"], ["y"], axis=0)],
    "unsqueeze": [node("Unsqueeze", ["s", "i0"], ["y"])],
    "squeeze": [node("Gather", ["s", "i0"], ["a"]), node("Squeeze", ["a", "i0"], ["y"])],
    "reshape": [node("Reshape", ["s", "shape3"], ["y"])],
    "transpose": [node("Reshape", ["s", "shape3"], ["a"]), node("Transpose", ["a"], ["y"], perm=[2, 1, 0])],
    "expand": [node("Gather", ["s", "n0"], ["a"]), node("Expand", ["a", "i3"], ["y"])],
    "tile": [node("Tile", ["s", "i2"], ["y"])],
    "arithmetic": [
        node("Add", ["s", "s"], ["a"]),
        node("Mul", ["a", "n3"], ["b"]),
        node("Sub", ["b", "n1"], ["c"]),
        node("Neg", ["c"], ["d"]),
        node("Abs", ["d"], ["y"]),
    ],
    "div": [node("Add", ["s", "n5"], ["a"]), node("Div", ["a", "n2"], ["y"])],
    "negative div": [node("Neg", ["s"], ["a"]), node("Div", ["a", "n3"], ["y"])],
    "mod": [node("Mod", ["s", "n3"], ["y"])],
    "min and max": [node("Min", ["s", "n5"], ["a"]), node("Max", ["a", "n2", "i3"], ["y"])],
    "where": [node("Equal", ["s", "n-1"], ["a"]), node("Where", ["a", "n1", "s"], ["y"])],
    "compare": [node("Greater", ["s", "n0"], ["a"]), node("Cast", ["a"], ["y"], to=TensorProto.INT64)],
    "reduce prod": [node("ReduceProd", ["s"], ["y"], keepdims=0)],
    "reduce sum": [node("ReduceSum", ["s"], ["y"])],
    "reduce max": [node("ReduceMax", ["s"], ["y"])],
    "size": [node("Size", ["x"], ["y"])],
    "cast": [
        node("Cast", ["s"], ["a"], to=TensorProto.FLOAT),
        node("Mul", ["a", "two"], ["b"]),
        node("Floor", ["b"], ["c"]),
        node("Cast", ["c"], ["y"], to=TensorProto.INT32),
    ],
    "divided float": [
        node("Mul", ["s", "n8"], ["a"]),
        node("Cast", ["a"], ["b"], to=TensorProto.FLOAT),
        node("Div", ["b", "two"], ["c"]),
        node("Cast", ["c"], ["y"], to=TensorProto.INT64),
    ],
    "start and end": [node("Shape", ["x"], ["y"], start=-1)],
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_of_shapes_fold_to_sizes(name: str) -> None:
    made = model([node("Shape", ["x"], ["s"]), *COMPUTATIONS[name]], {"x": ("batch", 6, "length")}, ["y"])
    imported = import_onnx(made)
    # What is left gives the result itself at run time: its elements, joined.
    assert {op.name for op in imported.module.main.ops} <= {"constant", "reshape", "concat"}
    assert not imported.module.records
    expect(made, imported, [(1, 6, 1), (2, 6, 7), (5, 6, 3), (13, 6, 128)])


def expect(made: Any, imported: Any, shapes: list[tuple[int, ...]]) -> None:
    """At each shape of ``x`` the program computes what onnx's evaluator does."""
    verify(imported.module, check)
    assert parse(print_module(imported.module)) == imported.module
    evaluator = ReferenceEvaluator(made)
    (symbolic,) = (item.value.tensor.shape for item in imported.module.main.inputs if item.role == "input")
    for shape in shapes:
        x = normal(*shape)
        values = {str(n): size for n, size in zip(symbolic, shape, strict=True) if str(n).isidentifier()}
        main = specialize(imported.module, values).main
        found = interpret(main, {**imported.tensors, "x": torch.from_numpy(x)})
        for output, expected in zip(main.outputs, evaluator.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(found[output.name].numpy(), expected, rtol=1e-5, atol=1e-5)
            assert found[output.name].numpy().dtype == expected.dtype


def positions() -> list[Any]:
    """Positions below the length, added to the operand where they are even, and its rows repeated."""
    return [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "n1"], ["length"]),
        node("Range", ["n0", "length", "n1"], ["at"]),
        node("Mod", ["at", "n2"], ["odd"]),
        node("Cast", ["odd"], ["no"], to=TensorProto.BOOL),
        node("ConstantOfShape", ["s"], ["zeros"]),
        node("Cast", ["at"], ["numbers"], to=TensorProto.FLOAT),
        node("Where", ["no", "zeros", "numbers"], ["picked"]),
        node("Expand", ["picked", "s"], ["wide"]),
        node("Add", ["x", "wide"], ["moved"]),
        node("Cast", ["length"], ["float"], to=TensorProto.FLOAT),
        node("Sqrt", ["float"], ["root"]),
        node("Div", ["moved", "root"], ["scaled"]),
        node("Concat", ["i2", "i1"], ["times"], axis=0),
        node("Tile", ["scaled", "times"], ["y"]),
    ]


@pytest.mark.parametrize("placement", ["S[0]", "S[1]"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sizes_that_reach_runtime_ops(ranks: int, placement: str) -> None:
    made = model(positions(), {"x": ("batch", "length")}, ["y"])
    plan = dr.compile(made, mesh=ranks, shardings={"x": placement}, verify=True)
    for shape in ((1, 1), (2, 7), (3, 2), (13, 128)):
        x = normal(*shape)
        expected = ReferenceEvaluator(made).run(None, {"x": x})[0]
        np.testing.assert_allclose(plan(x).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", [10**9, 2**31 - 1, 2**63 - 1])
def test_slices_to_the_end(end: int) -> None:
    nodes = [node("Slice", ["x", "i1", "last", "i1"], ["a"]), node("Slice", ["a", "i-1", "near", "i0", "i-1"], ["y"])]
    made = model(nodes, {"x": ("batch", "length")}, ["y"])
    made.graph.initializer.append(numpy_helper.from_array(np.array([end]), "last"))
    imported = import_onnx(made)
    assert "min" not in print_module(imported.module)
    expect(made, imported, [(1, 1), (3, 2), (7, 13)])


def test_pads_of_symbolic_sizes() -> None:
    for mode, widths in {"constant": (1, 2), "reflect": (3, 2), "edge": (2, 1), "wrap": (1, 3)}.items():
        nodes = [node("Pad", ["x", "widths", "", "i1"], ["y"], mode=mode)]
        made = model(nodes, {"x": ("batch", "length")}, ["y"])
        made.graph.initializer.append(numpy_helper.from_array(np.array(widths), "widths"))
        expect(made, import_onnx(made, dims={"length": (4, None)}), [(1, 4), (3, 7), (2, 128)])
    with pytest.raises(UnsupportedOpError, match="needs at least 3 elements, and length may be less") as raised:
        import_onnx(made)
    assert "by dims= or --dim: length=1:64" in raised.value.hint


def test_a_comparison_of_sizes_that_decides_a_branch_is_a_guard() -> None:
    infos = [helper.make_value_info("z", onnx.TypeProto())]
    branches = {
        f"{name}_branch": helper.make_graph([node(op, ["x"], ["z"])], name, [], infos)
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "n0"], ["batch"]),
        node("Equal", ["batch", "n1"], ["single"], name="/is_single"),
        node("If", ["single"], ["y"], **branches),
    ]
    made = model(nodes, {"x": ("batch", 3)}, ["y"])
    imported = import_onnx(made)
    assert [(str(guard), guard.location) for guard in imported.module.records if isinstance(guard, Guard)] == [
        ("batch != 1", "made:/is_single")
    ]
    plan = dr.compile(made, mesh=2, shardings={"x": "S[0]"})
    for batch in (2, 7):
        torch.testing.assert_close(plan(normal(batch, 3)), torch.from_numpy(np.abs(normal(batch, 3))))
    with pytest.raises(RunError, match=r"/is_single: expected batch != 1, found batch = 1"):
        plan(normal(1, 3))
    single = dr.compile(made, dims={"batch": 1}, mesh=1)
    torch.testing.assert_close(single(normal(1, 3)), torch.from_numpy(-normal(1, 3)))


GUARDED: dict[str, tuple[list[Any], dict[str, Any], str, list[tuple[int, ...]], tuple[int, ...]]] = {
    "gather": (
        [node("Gather", ["x", "far"], ["y"], axis=1)],
        {"far": np.array([5, 0])}, "5 < c", [(1, 6, 3), (7, 13, 2)], (2, 5, 3),
    ),
    "topk": (
        [node("TopK", ["x", "k"], ["y", "at"], axis=1)],
        {"k": np.array([3])}, "c >= 3", [(1, 3, 1), (7, 13, 2)], (3, 2, 4),
    ),
    "convolution": (
        [node("Conv", ["x", "w"], ["y"], kernel_shape=[4])],
        {"w": normal(5, 3, 4)}, "h - 3 >= 0", [(1, 3, 4), (2, 3, 9)], (2, 3, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", GUARDED)
def test_guards_hold_in_all_passes_and_in_a_saved_bundle(name: str, ranks: int, tmp_path: Path) -> None:
    nodes, data, guard, shapes, wrong = GUARDED[name]
    made = model(nodes, {"x": ("n", 3 if name == "convolution" else "c", "h")}, ["y"])
    made.graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in data.items())
    plan = dr.compile(made, mesh=ranks, shardings={"x": "S[0]"}, verify=True)
    assert [(str(g), g.location) for g in plan.modules["global"].guards] == [(guard, "made:y")]
    plan.save(tmp_path / "out", backends=("torch",))
    loaded = dr.load(tmp_path / "out")
    for shape in shapes:
        expected = ReferenceEvaluator(made).run(None, {"x": normal(*shape)})[0]
        np.testing.assert_allclose(loaded(normal(*shape)).numpy(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RunError, match=re.escape(f"made:y: expected {guard}, found")):
        loaded(normal(*wrong))


def test_collectives_are_checked_for_sizes_that_meet_the_guards() -> None:
    made = model([node("Conv", [x, "w"], [y]) for x, y in ("xa", "ab", "by")], {"x": ("n", 4, "h")}, ["y"])
    made.graph.initializer.append(numpy_helper.from_array(normal(4, 4, 3), "w"))
    plan = dr.compile(made, strategy="1/2/1/1", verify=True)
    for shape in ((1, 4, 7), (2, 4, 19)):
        expected = ReferenceEvaluator(made).run(None, {"x": normal(*shape)})[0]
        np.testing.assert_allclose(plan(normal(*shape)).numpy(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RunError, match="expected h - 6 >= 0, found h = 5"):
        plan(normal(1, 4, 5))
    narrow = dr.compile(made, strategy="1/1/1/1", precision="bf16")
    exact = plan(normal(2, 4, 19))
    assert (narrow(normal(2, 4, 19)) - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize(
    ("start", "step", "sizes"), [(0.0, 1.0, (1, 9)), (2.5, 0.5, (2, 3, 9)), (7.0, -1.5, (1, 6, 7, 9))]
)
def test_a_range_of_floats_over_an_open_dim(start: float, step: float, sizes: tuple[int, ...]) -> None:
    bounds = {"start": np.float32(start), "step": np.float32(step)}
    end = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "n0"], ["n"]), node("Cast", ["n"], ["end"], to=1)]
    made = model([*end, node("Range", ["start", "end", "step"], ["y"])], {"x": ("n",)}, ["y"])
    made.graph.initializer.extend(numpy_helper.from_array(np.array(array), key) for key, array in bounds.items())
    imported = import_onnx(made)
    for size in sizes:
        (expected,) = ReferenceEvaluator(made).run(None, {"x": normal(size)})
        found = interpret(specialize(imported.module, {"n": size}), {**imported.tensors, "x": torch.zeros(size)})
        torch.testing.assert_close(found["y"], torch.from_numpy(expected))


def test_errors_say_which_dims_to_bound() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Expand", ["w", "s"], ["a"]), node("Add", ["x", "a"], ["y"])]
    made = model(nodes, {"x": ("batch", "length")}, ["y"])
    made.graph.initializer.append(numpy_helper.from_array(normal(5), "w"))
    with pytest.raises(UnsupportedOpError, match=r"Expand.*an expansion of 5 to length") as raised:
        import_onnx(made)
    assert "bound, fix or relate such dims by dims= or --dim: length=1:64, length=48" in raised.value.hint
    expect(made, import_onnx(made, dims={"length": 5}), [(1, 5), (3, 5)])
    two = model([node("Add", ["x", "z"], ["y"])], {"x": ("n", 3), "z": ("m", 3)}, ["y"])
    with pytest.raises(UnsupportedOpError, match=r"Add cannot be converted for every size of m, n: .*do not broadcast"):
        import_onnx(two)
    plan = dr.compile(two, dims={"m": "n"}, mesh=2, shardings={"x": "S[0]"})
    torch.testing.assert_close(plan(normal(7, 3), normal(7, 3)), 2 * torch.from_numpy(normal(7, 3)))
    with pytest.raises(RunError, match="n is 7 in dim 0 of input 'x', found 2"):
        plan(normal(7, 3), normal(2, 3))
    trips = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "n0"], ["trips"]),
        node("Loop", ["trips", "", "x"], ["y"], body=helper.make_graph(
            [node("Identity", ["go"], ["going"]), node("Add", ["a", "a"], ["b"])], "body",
            [helper.make_tensor_value_info(name, kind, ()) for name, kind in (("i", 7), ("go", 9), ("a", 1))],
            [helper.make_tensor_value_info(name, kind, ()) for name, kind in (("going", 9), ("b", 1))])),
    ]  # fmt: skip
    with pytest.raises(UnsupportedOpError, match="the number of iterations, batch, may differ from call to call"):
        import_onnx(model(trips, {"x": ("batch", 3)}, ["y"]))


def export(module: Any, call: dict[str, Any], axes: dict[str, dict[int, str]], path: Path, **more: Any) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(call.values()), str(path), input_names=list(call), opset_version=18, dynamo=False,
            dynamic_axes=axes, **more,
        )  # fmt: skip


TRANSFORMERS = [exported.gpt2, exported.bert, exported.llama, exported.t5]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("make", TRANSFORMERS, ids=lambda f: f.__name__)
def test_transformers_at_every_batch_and_length(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformer, call, shardings = make()
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    module = exported.Positional(transformer, list(call)).eval()
    path = tmp_path / "model.onnx"
    axes = {name: {0: "batch", 1: "target" if "decoder" in name else "sequence"} for name in call}
    export(module, call, axes, path)
    for ranks, layout in ((2, shardings), (3, dict.fromkeys(call, "S[0]"))):
        plan = dr.compile(path, dims={"sequence": (1, 512)}, shardings=layout, mesh=ranks)
        assert not [r for r in plan.modules["global"].records if isinstance(r, Guard)]
        for batch, length in ((1, 1), (2, 9), (3, 7), (5, 13)):
            inputs = {name: tokens(name, batch, length + ("decoder" in name)) for name in call}
            with torch.no_grad():
                expected = module(*inputs.values())
            torch.testing.assert_close(plan(**inputs), expected, atol=2e-5, rtol=2e-5)


def tokens(name: str, batch: int, length: int) -> torch.Tensor:
    if name == "position_ids":
        return torch.arange(length).expand(batch, length)
    if "mask" not in name:
        return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, max(1, length - 2) :] = 0
    return mask


class Cached(torch.nn.Module):
    """Attention to the keys and values of earlier calls, and to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        query, key, value = (t.view(batch, length, 2, 4).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        weights = torch.softmax(query @ keys.transpose(2, 3) / 2 + mask[:, None, None], -1)
        return (weights @ values).transpose(1, 2).reshape(batch, length, 8), keys, values


@pytest.mark.parametrize(("ranks", "shardings"), [(1, {}), (2, {"x": "S[0]"}), (3, {"keys": "S[1]"})])
def test_a_dim_that_is_a_sum_of_others(ranks: int, shardings: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = Cached().eval(), tmp_path / "cached.onnx"
    call = {"x": torch.randn(2, 3, 8), "keys": torch.randn(2, 2, 5, 4), "values": torch.randn(2, 2, 5, 4)}
    axes = {"x": {0: "batch", 1: "new"}, "mask": {0: "batch", 1: "past + new"}}
    axes |= {name: {0: "batch", 2: "past"} for name in ("keys", "values")}
    export(module, {**call, "mask": torch.randn(2, 8)}, axes, path, output_names=["y", "all_keys", "all_values"])
    plan = dr.compile(path, dims={"past": (0, 64)}, mesh=ranks, shardings=shardings)
    for batch, past, new in ((1, 0, 1), (2, 7, 1), (5, 3, 2), (3, 64, 13)):
        state = [torch.randn(batch, 2, past, 4) for _ in range(2)]
        inputs = (torch.randn(batch, new, 8), *state, torch.randn(batch, past + new))
        with torch.no_grad():
            expected = module(*inputs)
        for found, wanted in zip(plan(*inputs).values(), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(RunError, match="mask"):
        plan(*inputs[:3], torch.randn(3, 76))


@pytest.mark.parametrize(("ranks", "placement"), [(1, "R"), (2, "S[0]"), (3, "S[0]")])
def test_images_of_any_multiple_of_four(ranks: int, placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = exported.Convolutional().eval(), tmp_path / "unet.onnx"
    axes = {"x": {0: "batch", 2: "height", 3: "width"}}
    export(module, {"x": torch.randn(2, 3, 20, 24)}, axes, path, output_names=["image", "classes"])
    with pytest.raises(UnsupportedOpError, match="Resize cannot be converted for every size of height"):
        import_onnx(path)
    dims = {"height": "4*rows", "width": "4*columns", "rows": (1, 50), "columns": (1, None)}
    plan = dr.compile(path, dims=dims, mesh=ranks, shardings={"x": placement})
    for shape in ((1, 3, 4, 4), (2, 3, 20, 24), (5, 3, 12, 28)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = module(x)
        for found, wanted in zip(plan(x).values(), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(RunError, match="dim 2 of input 'x': expected a multiple of 4, found 22"):
        plan(torch.randn(1, 3, 22, 24))
    with pytest.raises(ImportModelError, match="the model has no dim 'colums'"):
        import_onnx(path, dims={**dims, "colums": (1, 2)})


def test_recurrent_layers_at_every_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = torch.nn.LSTM(5, 7, batch_first=True).eval(), tmp_path / "lstm.onnx"
    export(module, {"x": torch.randn(2, 4, 5)}, {"x": {0: "batch"}}, path, output_names=["y", "h", "c"])
    plan = dr.compile(path, mesh=2, shardings={"x": "S[0]"})
    assert any("lstm" in op.name for op in inline(plan.modules["distributed"]).main.ops)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 4, 5)
        with torch.no_grad():
            expected, _ = module(x)
        torch.testing.assert_close(plan(x)["y"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["QLinearAdd", "QGemm"])
def test_unknown_op_has_no_hint_about_sizes(name: str) -> None:
    made = model([node(name, ["x", "y"], ["z"], domain="com.microsoft")], {"x": ["n", 3], "y": ["n", 3]}, ["z"])
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(UnsupportedOpError, match=f"com.microsoft::{name}") as raised:
        import_onnx(made)
    assert "dims=" not in raised.value.hint
