"""Relax modules in: the RFC's example as text, constants, tuples, calls, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import distir_relax as dr
from distir_relax.errors import (
    DistIRError,
    ImportModelError,
    PlacementError,
    RunError,
    UnsupportedOpError,
)
from distir_relax.frontends.relax import import_relax
from distir_relax.ir import Value, print_module
from distir_relax.layout import print_placements
from tests.frontends.relax_modules import HEAD, run, script

RFC = """
    @R.function
    def foo(
        x: R.Tensor((128, 128), "float32"),
        A: R.Tensor((128, 127), "float32"),
        B: R.Tensor((127, 128), "float32"),
        C: R.Tensor((128, 1), "float32"),
    ) -> R.Tensor((128, 128), "float32"):
        A_1 = R.dist.annotate_sharding(A, device_mesh="mesh[0]", placement="S[1]")
        lv0 = R.matmul(x, A_1)
        Y = R.nn.gelu(lv0)
        Z = R.matmul(Y, B)
        O = R.multiply(Z, C)
        return O
"""


def test_the_example_of_the_rfc() -> None:
    imported = import_relax(script(RFC))
    assert print_module(imported.module) == (
        """module @global {
  mesh[0] = device_mesh((2,), ("axis0",))
  func @main(
    input %x: f32[128,128],  # @foo, x
    input %A: f32[128,127],  # @foo, A
    input %B: f32[127,128],  # @foo, B
    input %C: f32[128,1],  # @foo, C
  ) {
    %A_1: f32[128,127] = annotate_sharding(%A) {placements="S[1]"}  # @foo, A_1
    %lv0: f32[128,127] = matmul(%x, %A_1)  # @foo, lv0
    %Y: f32[128,127] = nn.gelu(%lv0)  # @foo, Y
    %Z: f32[128,128] = matmul(%Y, %B)  # @foo, Z
    %O: f32[128,128] = multiply(%Z, %C)  # @foo, O
    return "O": %O
  }
}
"""
    )
    assert imported.names == {name: name for name in "xABC"}


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_the_example_of_the_rfc_compiled_and_run(backend: str, tail: str) -> None:
    plan = dr.compile(script(RFC), tail=tail)
    generator = torch.Generator().manual_seed(0)
    x, a, b, c = (torch.randn(*s, generator=generator) for s in ((128, 128), (128, 127), (127, 128), (128, 1)))
    expected = torch.nn.functional.gelu(x @ a / 11) @ b * c
    torch.testing.assert_close(plan(x, a / 11, b, C=c, backend=backend), expected, atol=1e-4, rtol=1e-4)


FUNCTIONS = """
    @R.function(private=True)
    def twice(v: R.Tensor((2, 3), "float32")) -> R.Tuple(R.Tensor((2, 3), "float32"), R.Tensor((2, 3), "float32")):
        w = R.add(v, v)
        return (w, v)

    @R.function
    def main(a: R.Tensor((2, 3), "float32"), b: R.Tensor((2, 3), "float32")):
        cls = Module
        @R.function
        def local(u: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            r = R.negative(u)
            return r
        with R.dataflow():
            p = cls.twice(a)
            q = cls.twice(b)
            s = R.subtract(p[0], q[0])
            t = ((s, p[1]), s)
            R.output(s, t)
        n = local(s)
        return ((n, t[0][1]), n)
"""


def test_functions_are_inlined_and_tuples_keep_their_structure() -> None:
    imported = import_relax(script(FUNCTIONS))
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    (n, first), again = run(imported, a, b)
    torch.testing.assert_close(n, 2 * b - 2 * a)
    torch.testing.assert_close(first, a)
    torch.testing.assert_close(again, n)
    assert [op.location for op in imported.module.main.ops] == ["@twice, w", "@twice, w", "@main, s", "@local, r"]
    assert [o.name for o in imported.module.main.outputs] == ["r", "a", "r_2"]


PLAIN = HEAD[: HEAD.index("    I.module_attrs")]
"""A module without a mesh of its own."""

WEIGHTS = """
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), b: R.Tensor((4,), "float32")):
        R.func_attr({"num_input": 1})
        y = R.add(R.matmul(x, w), b)
        z = R.multiply(y, R.const(2.0, "float32"))
        return z
"""


def test_given_parameters_are_weights() -> None:
    x, w, b = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    for params in ([w, b], {"w": w.numpy(), "b": tvm.runtime.tensor(b.numpy())}):
        imported = import_relax(script(WEIGHTS), params=params)
        assert [item.role for item in imported.module.main.inputs] == ["input", "parameter", "parameter"]
        torch.testing.assert_close(run(imported, x), (x @ w + b) * 2)
    plain = script(WEIGHTS.replace('R.func_attr({"num_input": 1})', "R.func_attr({})"))
    assert [item.role for item in import_relax(plain).module.main.inputs] == ["input"] * 3
    assert [item.role for item in import_relax(plain, params=[b]).module.main.inputs] == ["input", "input", "parameter"]


def test_the_parameters_behind_the_inputs_are_weights() -> None:
    x, w, b = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    sharded = {"shardings": {"w": "S[0]"}, "mesh": dr.DeviceMesh((2,), ("tp",))}
    plan = dr.compile(script(WEIGHTS, PLAIN), params=[w, b], **sharded)  # type: ignore[arg-type]
    torch.testing.assert_close(plan(x), (x @ w + b) * 2)
    plan = dr.compile(script(WEIGHTS, PLAIN), **sharded)  # type: ignore[arg-type]
    assert [item.role for item in plan.modules["ranked"].functions[0].inputs] == ["input", "parameter", "parameter"]
    with pytest.raises(DistIRError, match=r"the data of the weights w, b, found none"):
        plan(x)
    with pytest.raises(ImportModelError, match="params are for TVM modules, found Linear"):
        dr.compile(torch.nn.Linear(3, 3), (x,), params=[w])


OPEN = """
    @R.function
    def main(x: R.Tensor(("n", 6), "float32"), w: R.Tensor((6, "m"), "float32")):
        n = T.int64()
        m = T.int64()
        y = R.matmul(x, w)
        z = R.reshape(y, R.shape([n, m // 2, 2]))
        return R.sum(z, axis=[2])
"""


@pytest.mark.parametrize("rows", [1, 5])
def test_open_dims_are_bound_by_the_shapes_of_inputs(rows: int) -> None:
    shapes = {"x": (rows, 6), "w": (6, 10)}
    mesh = dr.DeviceMesh((3,), ("tp",))
    plan = dr.compile(script(OPEN, PLAIN), input_shapes=shapes, shardings={"w": "S[1]"}, mesh=mesh)
    x, w = torch.randn(rows, 6), torch.randn(6, 10)
    torch.testing.assert_close(plan(x, w), (x @ w).reshape(rows, 5, 2).sum(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, r'dims m of w are left open: R.Tensor\(\(6, m\), .*[\s\S]*input_shapes=\{"w"'),
        ({"x": (5, 6)}, r"dims m of w are left open"),
        ({"x": (5, 7)}, r"@main, x: expected a shape for R.Tensor\(\(n, 6\), dtype=\"float32\"\), found \(5, 7\)"),
        ({"x": (5,)}, r"expected a shape for .*, found \(5,\)"),
        ({"y": (5,)}, r"@main has no parameters y[\s\S]*it has x, w"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    text = OPEN.replace("        y =", '        R.func_attr({"num_input": 1})\n        y =')
    with pytest.raises(ImportModelError, match=message):
        dr.compile(script(text, PLAIN), input_shapes=shapes)


def test_a_symbol_has_one_size() -> None:
    text = OPEN.replace('(6, "m")', '("n", "m")').replace('("n", 6)', '("n", "n")')
    with pytest.raises(ImportModelError, match="the dim 'n' is 7 here, and 6 elsewhere"):
        dr.compile(script(text, PLAIN), input_shapes={"x": (6, 6), "w": (7, 4)})


def test_constants_keep_their_data_and_scalars_are_written_out() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    data = np.arange(6, dtype="float32").reshape(2, 3)
    with builder.function("main", [x]):
        builder.emit_func_output(
            builder.emit(relax.op.add(relax.op.multiply(x, relax.const(3.0, "float32")), relax.const(data)))
        )
    imported = import_relax(builder.get())
    [constant] = [item for item in imported.module.main.inputs if item.role == "constant"]
    torch.testing.assert_close(imported.tensors[constant.value.name], torch.from_numpy(data))
    assert [op.attrs for op in imported.module.main.ops if op.name == "constant"] == [
        {"value": 3.0, "dtype": "float32"}
    ]
    torch.testing.assert_close(run(imported, torch.ones(2, 3)), torch.from_numpy(data) + 3)
    assert "constant" not in imported.names


def test_types_with_a_layout_are_annotations() -> None:
    text = """
    @R.function
    def foo(A: R.DTensor((4, 127), "float32", "mesh[0]", "S[1]")) -> R.DTensor((4, 127), "float32", "mesh[0]", "S[1]"):
        y: R.DTensor((4, 127), "float32", "mesh[0]", "S[1]") = R.nn.relu(A)
        return y
"""
    imported = import_relax(script(text))
    marks = [op for op in imported.module.main.ops if op.name == "annotate_sharding"]
    assert [(op.operands[0].name, print_placements(op.placements)) for op in marks] == [("A", "S[1]"), ("y", "S[1]")]
    assert [output.name for output in imported.module.main.outputs] == ["y"]
    assert imported.module.meshes == (dr.DeviceMesh((2,)),)


BAD: list[tuple[str, type[DistIRError], str]] = [
    (RFC.replace("R.nn.gelu(lv0)", "R.nn.selu(lv0)"), UnsupportedOpError,
     "@foo, Y: the op table has no Relax spelling for relax.nn.selu"),
    (RFC.replace("R.nn.gelu(lv0)", "R.mod(lv0, lv0)"), UnsupportedOpError,
     "@foo, Y: relax.mod: a remainder with the sign"),
    (RFC.replace("S[1]", "S[7]"), PlacementError, "@foo, A_1"),
    (RFC.replace("foo(", "foo(s: R.Shape([3]), "), ImportModelError, "expected a tensor of known shape"),
    (RFC.replace("128, 1)", '"n", 1)').replace("        A_1", '        R.func_attr({"num_input": 3})\n        A_1'),
     ImportModelError, "the dims n of C are left open"),
    (RFC.replace("R.multiply(Z, C)", "R.nonzero(Z)"), UnsupportedOpError, "@foo, O: relax.nonzero: how many elements"),
    (RFC + RFC.replace("foo", "bar"), ImportModelError,
     "expected a Relax function to compile, found bar, foo|foo, bar"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_is_named_with_its_place(text: str, kind: type[DistIRError], message: str) -> None:
    with pytest.raises(kind, match=message):
        import_relax(script(text))


def test_a_call_unlike_the_function_says_what_it_takes() -> None:
    imported = import_relax(script(RFC))
    x = torch.ones(1)
    for args, kwargs in (((x,), {}), ((x,) * 5, {}), ((x,) * 4, {"x": x}), ((x,) * 3, {"D": x})):
        with pytest.raises(RunError, match="@foo takes the inputs x, A, B, C"):
            imported.flatten(args, kwargs)
    with pytest.raises(RunError, match="expected a tensor of torch, numpy or TVM, found str"):
        imported.flatten((x, x, x, "y"), {})


def test_weights_of_the_wrong_shape_or_number() -> None:
    with pytest.raises(ImportModelError, match=r"expected f32\[3,4\] as the data of w, found f32\[4,3\]"):
        import_relax(script(WEIGHTS), params=[torch.ones(4, 3), torch.ones(4)])
    with pytest.raises(ImportModelError, match="3 parameters and 1 inputs, found data for 1"):
        import_relax(script(WEIGHTS), params=[torch.ones(3, 4)])
    with pytest.raises(ImportModelError, match="has no parameters v"):
        import_relax(script(WEIGHTS), params={"v": torch.ones(3, 4)})


def test_values_of_the_program_are_ours() -> None:
    imported = import_relax(script(RFC), function="foo")
    assert all(isinstance(v, Value) for op in imported.module.main.ops for v in op.operands)


CHANNELS_LAST = """
    @R.function
    def main(
        x: R.Tensor((2, 7, 5, 3), "float32"), w: R.Tensor((3, 3, 3, 4), "float32"), b: R.Tensor((4,), "float32")
    ):
        h = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[1]")
        y = R.nn.conv2d(h, w, padding=(1, 1), strides=(2, 1), data_layout="NHWC", kernel_layout="HWIO")
        return R.nn.relu(R.add(y, b))
"""


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_convolution_with_channels_last_split_by_rows(ranks: int, backend: str) -> None:
    """The second example of the RFC: rows are fetched from the neighbours, whatever the order of the dims."""
    plan = dr.compile(script(CHANNELS_LAST), mesh=dr.DeviceMesh((ranks,), ("tp",)))
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((2, 7, 5, 3), (3, 3, 3, 4), (4,)))
    whole = torch.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b, (2, 1), 1)
    expected = torch.relu(whole).permute(0, 2, 3, 1)
    torch.testing.assert_close(plan(x, w, b, backend=backend), expected, atol=1e-5, rtol=1e-5)
    assert "all_gather" not in plan.text("distributed")


def test_a_convolution_may_give_its_dims_in_another_order() -> None:
    """TVM has no code for it: torch is the reference."""
    text = CHANNELS_LAST.replace('kernel_layout="HWIO"', 'kernel_layout="HWIO", out_layout="NCHW"')
    x, w = torch.randn(2, 7, 5, 3), torch.randn(3, 3, 3, 4)
    imported = import_relax(script(text[: text.index("        return")].replace("(4,)", "(3,)") + "        return y"))
    whole = torch.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), None, (2, 1), 1)
    torch.testing.assert_close(run(imported, x, w, torch.zeros(3)), whole, atol=1e-5, rtol=1e-5)


def test_a_layout_in_blocks_is_refused() -> None:
    text = CHANNELS_LAST.replace("(2, 7, 5, 3)", "(2, 1, 7, 5, 4)").replace('"NHWC"', '"NCHW4c"')
    text = text.replace("(3, 3, 3, 4)", "(4, 4, 3, 3)").replace('"HWIO"', '"OIHW"').replace("S[1]", "R")
    with pytest.raises(UnsupportedOpError, match="the layout NCHW4c; expected the letters of NCHW in any order"):
        import_relax(script(text))
