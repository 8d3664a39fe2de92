"""Every Relax spelling of an op, against TVM itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from distir_relax import ops
from distir_relax.frontends.relax import import_relax
from tests.frontends.relax_modules import run

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
    ("prod", lambda R, x, i: R.prod(x, [0, 2])),
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
        "conv1d, NWC",
        lambda R, x, i: R.nn.conv1d(x, _weights(3, 5, 2), 2, (1, 0), data_layout="NWC", kernel_layout="WIO"),
    ),
    (
        "conv2d, NHWC",
        lambda R, x, i: R.nn.conv2d(
            _last(R, x), _weights(2, 3, 1, 6), 1, (1, 0, 0, 1), (1, 2), 3, data_layout="NHWC", kernel_layout="HWIO"
        ),
    ),
    (
        "conv3d, NDHWC",
        lambda R, x, i: R.nn.conv3d(
            R.permute_dims(_volume(R, x), [0, 2, 3, 4, 1]),
            _weights(2, 3, 1, 1, 2),
            padding=1,
            data_layout="NDHWC",
            kernel_layout="DHWIO",
        ),
    ),
    (
        "max_pool2d, NHWC",
        lambda R, x, i: R.nn.max_pool2d(_last(R, x), (3, 2), (2, 1), 1, layout="NHWC"),
    ),
    ("avg_pool1d, NWC", lambda R, x, i: R.nn.avg_pool1d(x, 2, 2, layout="NWC")),
    ("adaptive_avg_pool2d, NHWC", lambda R, x, i: R.nn.adaptive_avg_pool2d(_last(R, x), (2, 3), layout="NHWC")),
    (
        "image.resize2d, NHWC",
        lambda R, x, i: R.image.resize2d(_last(R, x), (7, 3), layout="NHWC", method="linear"),
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


def _last(R: Any, x: Any) -> Any:
    """A picture with its channels last."""
    return R.permute_dims(_picture(R, x), [0, 2, 3, 1])


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
    declared = {name.removeprefix("relax.").removeprefix("nn.") for name in ops.relax_spellings()}
    refused = {"mod", "attention_bias"}
    # These need a function of a module: tests/frontends/test_relax_tvm_extern.py.
    foreign = {"call_tir", "call_dps_packed"}
    assert declared - refused - foreign <= used
