"""Relax modules in: the RFC's example as text, every spelling against TVM itself, constants, tuples, calls, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax import ir, ops
from distir_relax.errors import (
    AnnotationError,
    DistIRError,
    ImportModelError,
    PlacementError,
    RunError,
    UnsupportedOpError,
)
from distir_relax.frontends.imported import Imported
from distir_relax.frontends.relax import import_relax
from distir_relax.ir import Value, print_module

tvm = pytest.importorskip("tvm")

from tvm import relax  # noqa: E402
from tvm.script import from_source  # noqa: E402

HEAD = """
# from tvm.script import ir as I
# from tvm.script import relax as R
# from tvm.script import tirx as T
@I.ir_module(s_tir=True)
class Module:
    I.module_attrs({"device_num": 2})
    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})
"""

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


def script(body: str) -> Any:
    """The module with these functions."""
    from tvm.script.parser import ir as I
    from tvm.script.parser import relax as R
    from tvm.script.parser import tirx as T

    return from_source(HEAD + body, extra_vars={"I": I, "R": R, "T": T})


def run(imported: Imported, *args: torch.Tensor) -> Any:
    """The imported program, op by op, as the op table means it."""
    values: dict[str, torch.Tensor] = {**imported.tensors, **imported.flatten(args, {})}
    ir.verify(imported.module, ops.check)
    for op in imported.module.main.ops:
        results = ops.evaluate(op, [values[v.name] for v in op.operands])
        values.update({v.name: y for v, y in zip(op.results, results, strict=True)})
    return imported.rebuild({o.name: values[o.value.name] for o in imported.module.main.outputs})


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


SPELLINGS: list[tuple[str, Callable[[Any, Any, Any], Any]]] = [
    ("reshape", lambda R, x, i: R.reshape(x, (3, -1))),
    ("expand_dims", lambda R, x, i: R.expand_dims(x, [0, -1])),
    ("squeeze", lambda R, x, i: R.squeeze(R.expand_dims(x, [1, 2]), [1])),
    ("squeeze all", lambda R, x, i: R.squeeze(R.expand_dims(x, [1, 2]))),
    ("flatten", lambda R, x, i: R.flatten(x)),
    ("permute_dims", lambda R, x, i: R.permute_dims(x, [1, 0, 2])),
    ("permute_dims reversed", lambda R, x, i: R.permute_dims(x)),
    ("broadcast_to", lambda R, x, i: R.broadcast_to(x, (2, 3, 4, 5))),
    ("full", lambda R, x, i: R.full((2, 3), relax.const(1.5, "float32"))),
    ("zeros", lambda R, x, i: R.add(x, R.zeros((5,), "float32"))),
    ("ones", lambda R, x, i: R.add(x, R.ones((5,), "float32"))),
    ("concat", lambda R, x, i: R.concat([x, x], -1)),
    ("split sections", lambda R, x, i: R.split(x, 3, 2)[1]),
    ("split indices", lambda R, x, i: R.split(x, [1, 3], -1)[2]),
    ("strided_slice", lambda R, x, i: R.strided_slice(x, [1, 2], [1, -3], [100, 5], [2, 1])),
    ("pad", lambda R, x, i: R.nn.pad(x, [0, 0, 1, 2, 0, 3], "constant", 2.5)),
    ("pad by reflection", lambda R, x, i: R.nn.pad(x, [0, 0, 1, 2, 0, 3], "reflect")),
    ("pad by the edge", lambda R, x, i: R.nn.pad(x, [0, 0, 1, 2, 0, 3], "replicate")),
    ("pad, circular", lambda R, x, i: R.nn.pad(x, [0, 0, 1, 2, 0, 3], "circular")),
    ("sum", lambda R, x, i: R.sum(x, -1, True)),
    ("sum all", lambda R, x, i: R.sum(x)),
    ("mean", lambda R, x, i: R.mean(x, [0, 2])),
    ("max", lambda R, x, i: R.max(x, 1)),
    ("min", lambda R, x, i: R.min(x, [1, -1], True)),
    ("softmax", lambda R, x, i: R.nn.softmax(x, -1)),
    ("log_softmax", lambda R, x, i: R.nn.log_softmax(x, 1)),
    ("cumsum", lambda R, x, i: R.cumsum(x, -1)),
    ("layer_norm", lambda R, x, i: R.nn.layer_norm(x, _row(2.0), _row(0.5), -1, 1e-5)),
    ("group_norm", lambda R, x, i: R.nn.group_norm(_flipped(R, x), _row(2.0), _row(0.5), 1, 1, [2], 1e-5)),
    ("instance_norm", lambda R, x, i: R.nn.instance_norm(_flipped(R, x), _row(2.0), _row(0.5), 1, [2], 1e-5)),
    ("rms_norm", lambda R, x, i: R.nn.rms_norm(x, _row(2.0), -1, 1e-6)),
    ("take", lambda R, x, i: R.take(x, i, 1)),
    ("take flat", lambda R, x, i: R.take(R.flatten(x), i)),
    ("matmul", lambda R, x, i: R.matmul(x, R.permute_dims(x, [0, 2, 1]))),
    ("matmul by a vector", lambda R, x, i: R.matmul(x, _row(2.0))),
    (
        "linear",
        lambda R, x, i: R.linear(x, relax.const(np.ones((3, 5), "float32")), relax.const(np.ones(3, "float32"))),
    ),
    ("astype", lambda R, x, i: R.astype(i, "float32")),
    ("clip", lambda R, x, i: R.clip(x, -0.5, 0.5)),
    ("floor_mod", lambda R, x, i: R.floor_mod(x, relax.const(0.75, "float32"))),
    ("where", lambda R, x, i: R.where(R.greater(x, relax.const(0.0, "float32")), x, R.negative(x))),
    ("gelu_tanh", lambda R, x, i: R.nn.gelu_tanh(x)),
    ("silu", lambda R, x, i: R.nn.silu(R.rsqrt(R.square(x)))),
    ("conv1d", lambda R, x, i: R.nn.conv1d(x, _weights(6, 2, 3), 2, (1, 0), 1, 2)),
    ("conv2d", lambda R, x, i: R.nn.conv2d(_picture(R, x), _weights(6, 1, 2, 3), 1, (1, 0), (2, 1), 3)),
    ("conv2d, all ends", lambda R, x, i: R.nn.conv2d(_picture(R, x), _weights(2, 3, 2, 3), (2, 1), (1, 0, 2, 1))),
    ("conv3d", lambda R, x, i: R.nn.conv3d(_volume(R, x), _weights(2, 1, 2, 3, 1), padding=1)),
    ("conv1d_transpose", lambda R, x, i: R.nn.conv1d_transpose(x, _weights(4, 3, 3), 2, 1, 1)),
    ("conv2d_transpose", lambda R, x, i: R.nn.conv2d_transpose(_picture(R, x), _weights(3, 2, 2, 3), 2, (1, 0, 0, 1))),
    ("conv3d_transpose", lambda R, x, i: R.nn.conv3d_transpose(_volume(R, x), _weights(1, 2, 2, 2, 1), (1, 2, 1))),
    ("max_pool1d", lambda R, x, i: R.nn.max_pool1d(x, 2, 2, (1, 1))),
    ("max_pool2d", lambda R, x, i: R.nn.max_pool2d(_picture(R, x), (3, 2), (2, 1), 1)),
    ("max_pool3d", lambda R, x, i: R.nn.max_pool3d(_volume(R, x), 2)),
    ("avg_pool1d", lambda R, x, i: R.nn.avg_pool1d(x, 3, 2, (1, 1), count_include_pad=True)),
    ("avg_pool2d", lambda R, x, i: R.nn.avg_pool2d(_picture(R, x), (3, 2), (2, 1), 1)),
    ("avg_pool3d", lambda R, x, i: R.nn.avg_pool3d(_volume(R, x), 2)),
    ("adaptive_avg_pool1d", lambda R, x, i: R.nn.adaptive_avg_pool1d(x, 1)),
    ("adaptive_avg_pool2d", lambda R, x, i: R.nn.adaptive_avg_pool2d(_picture(R, x), (2, 5))),
    ("adaptive_avg_pool3d", lambda R, x, i: R.nn.adaptive_avg_pool3d(_volume(R, x), (3, 2, 1))),
    ("image.resize2d", lambda R, x, i: R.image.resize2d(_picture(R, x), (7, 3), method="linear")),
    (
        "image.resize3d",
        lambda R, x, i: R.image.resize3d(
            _volume(R, x), (2, 5, 7), method="linear", coordinate_transformation_mode="align_corners"
        ),
    ),
    (
        "batch_norm",
        lambda R, x, i: R.nn.batch_norm(_flipped(R, x), *[_row(2.0)] * 4, 1, training=False)[0],
    ),
    ("scatter_elements", lambda R, x, i: R.scatter_elements(x, _ids(3, 4, 7), _weights(3, 4, 7), -1, "max")),
    ("scatter_nd", lambda R, x, i: R.scatter_nd(x, i, _weights(2, 5), "add")),
    ("scatter_nd, one index", lambda R, x, i: R.scatter_nd(x, _ids(2, 1), _weights(2, 4, 5), "update")),
    ("index_put", lambda R, x, i: R.index_put(x, (_ids(6), _ids(6), _ids(6)), _weights(6), True)),
    ("gather_nd", lambda R, x, i: R.gather_nd(x, i)),
    ("index_tensor", lambda R, x, i: R.index_tensor(x, [_ids(2, 1), i])),
    ("one_hot", lambda R, x, i: R.one_hot(i, 3, -1, 5, 1)),
    ("arange", lambda R, x, i: R.add(x, R.arange(1, 11, 2, "float32"))),
    ("argmax", lambda R, x, i: R.argmax(x, 1)),
    ("argmin", lambda R, x, i: R.argmin(x, -1, True)),
    ("argmin of all", lambda R, x, i: R.argmin(x)),
    ("topk", lambda R, x, i: R.topk(x, 2, -1, "both", True, "int64")[1]),
    ("topk values", lambda R, x, i: R.topk(x, 3, 1, "values", False)),
    ("argsort", lambda R, x, i: R.argsort(x, 1, True, "int32")),
    ("sort", lambda R, x, i: R.sort(x, -1, True)),
    ("gather_elements", lambda R, x, i: R.gather_elements(x, _ids(3, 4, 2), -1)),
    ("flip", lambda R, x, i: R.flip(x, -1)),
    ("tril", lambda R, x, i: R.tril(x, 1)),
    ("triu", lambda R, x, i: R.triu(x, -1)),
    ("stack", lambda R, x, i: R.stack([x, x], -1)),
    ("tile", lambda R, x, i: R.tile(x, (2, 3))),
    ("repeat", lambda R, x, i: R.repeat(x, 2, 1)),
    ("repeat all", lambda R, x, i: R.repeat(x, 2)),
    ("meshgrid", lambda R, x, i: R.meshgrid([_row(1.0), _weights(3)], "ij")[1]),
    ("zeros_like", lambda R, x, i: R.add(x, R.zeros_like(x))),
    ("ones_like", lambda R, x, i: R.ones_like(x, "int32")),
    ("full_like", lambda R, x, i: R.full_like(x, relax.const(2.5, "float32"))),
    ("einsum", lambda R, x, i: R.einsum([x, x], "abc,adc->abd")),
    ("variance", lambda R, x, i: R.variance(x, [1], True)),
    ("std", lambda R, x, i: R.std(x, [0, 2])),
    ("leakyrelu", lambda R, x, i: R.nn.leakyrelu(x, 0.2)),
    ("attention", lambda R, x, i: R.nn.attention(*[R.expand_dims(x, 2)] * 3, causal_mask="TopLeft")),
    ("attention, scaled", lambda R, x, i: R.nn.attention(*[R.expand_dims(x, 2)] * 3, scale=0.3)),
]


def _weights(*shape: int) -> Any:
    return relax.const(np.linspace(-1, 1, math.prod(shape), dtype="float32").reshape(shape))


def _ids(*shape: int) -> Any:
    return relax.const((np.arange(math.prod(shape), dtype="int64") % 3).reshape(shape))


def _picture(R: Any, x: Any) -> Any:
    return R.expand_dims(x, 0)


def _volume(R: Any, x: Any) -> Any:
    return R.expand_dims(x, [0, 1])


def _flipped(R: Any, x: Any) -> Any:
    """Its last dim of 5 as channels."""
    return R.permute_dims(x, [0, 2, 1])


def _row(value: float) -> Any:
    return relax.const(np.full(5, value, "float32") + np.arange(5, dtype="float32") / 7)


def test_every_spelling_means_what_it_means_in_tvm() -> None:
    x, i = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[2, 0], [1, 3]])
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var("x", relax.TensorType((3, 4, 5), "float32")),
        relax.Var("i", relax.TensorType((2, 2), "int64")),
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            results = [builder.emit(make(relax.op, *parameters)) for _, make in SPELLINGS]
            whole = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(whole)
    module = builder.get()
    machine = relax.VirtualMachine(relax.build(module, tvm.target.Target("llvm")), tvm.cpu())
    expected = machine["main"](tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(i.numpy()))
    found = run(import_relax(module), x, i)
    for (name, _), got, want in zip(SPELLINGS, found, expected, strict=True):
        torch.testing.assert_close(
            got, torch.from_numpy(want.numpy()), atol=1e-5, rtol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


def test_a_norm_without_scale_or_shift_is_what_relax_documents() -> None:
    # TVM's own legalization adds the shift all the same.
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    variable = relax.Var("x", relax.TensorType((3, 4, 5), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [variable]):
        norm = relax.op.nn.layer_norm(variable, _row(2.0), _row(0.5), -1, 1e-5, center=False, scale=False)
        builder.emit_func_output(builder.emit(norm))
    torch.testing.assert_close(run(import_relax(builder.get()), x), torch.nn.functional.layer_norm(x, (5,)))


def test_every_declared_spelling_is_tested() -> None:
    used = {name.split(",")[0].split(" ")[0] for name, _ in SPELLINGS}
    declared = {name.removeprefix("relax.").removeprefix("nn.") for name in ops.registry._RELAX}
    refused = {"mod", "attention_bias"}
    assert declared - refused <= used


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
    assert [item.role for item in import_relax(script(WEIGHTS)).module.main.inputs] == ["input"] * 3


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
    assert [(op.operands[0].name, op.attrs["placements"]) for op in marks] == [("A", "S[1]"), ("y", "S[1]")]
    assert [output.name for output in imported.module.main.outputs] == ["y"]
    assert imported.module.meshes == (ir.DeviceMesh((2,)),)


BAD: list[tuple[str, type[DistIRError], str]] = [
    (RFC.replace("R.nn.gelu(lv0)", "R.nn.selu(lv0)"), UnsupportedOpError, "@foo, Y: the op table has no Relax spelling for relax.nn.selu"),
    (RFC.replace("R.nn.gelu(lv0)", "R.mod(lv0, lv0)"), UnsupportedOpError, "@foo, Y: relax.mod: a remainder with the sign"),
    (RFC.replace("S[1]", "S[7]"), PlacementError, "@foo, A_1"),
    (RFC.replace("foo(", "foo(s: R.Shape([3]), "), ImportModelError, "expected a tensor of known shape"),
    (RFC.replace("128, 1)", '"n", 1)'), ImportModelError, "expected a number known now, found n"),
    (
        RFC.replace("R.matmul(x, A_1)", 'R.call_dps_packed("f", (x,), out_ty=R.Tensor((128, 127), "float32"))'),
        UnsupportedOpError,
        "@foo, lv0: the op table has no Relax spelling for relax.call_dps_packed of f",
    ),
    (RFC.replace("R.multiply(Z, C)", "R.nonzero(Z)"), UnsupportedOpError, "@foo, O: relax.nonzero: how many elements"),
    (RFC + RFC.replace("foo", "bar"), ImportModelError, "expected a Relax function to compile, found bar, foo|foo, bar"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_is_named_with_its_place(text: str, kind: type[DistIRError], message: str) -> None:
    with pytest.raises(kind, match=message):
        import_relax(script(text))


def test_call_tir_has_no_entry() -> None:
    lowered = relax.transform.LegalizeOps()(script(RFC.replace("S[1]", "R")))
    with pytest.raises(
        UnsupportedOpError, match=r"@foo, lv0: the op table has no Relax spelling for relax\.call_tir of matmul"
    ):
        import_relax(lowered)


def test_two_meshes_are_refused() -> None:
    text = RFC.replace(
        "lv0 = R.matmul(x, A_1)",
        'x_1 = R.dist.annotate_sharding(x, device_mesh="mesh[1]", placement="R")\n        lv0 = R.matmul(x_1, A_1)',
    )
    module = HEAD.replace("I.Range(0, 2))]", "I.Range(0, 2)), R.device_mesh((4,), I.Range(0, 4))]") + text
    from tvm.script.parser import ir as I
    from tvm.script.parser import relax as R

    with pytest.raises(AnnotationError, match="one mesh for all annotations"):
        import_relax(from_source(module, extra_vars={"I": I, "R": R}))


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
