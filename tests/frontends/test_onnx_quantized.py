"""Quantized ONNX models: files of onnxruntime's quantization, whose integers are computed exactly, on any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.onnx.importer import import_onnx

node = helper.make_node
RNG = np.random.default_rng(0)


def integers(*shape: int, dtype: Any = np.int8) -> np.ndarray[Any, Any]:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return RNG.integers(low, high, shape, dtype=dtype, endpoint=True)


DATA: dict[str, np.ndarray[Any, Any]] = {
    "x_scale": np.float32(0.03) * np.ones((), np.float32), "x_zero": np.array(113, np.uint8),
    "h_scale": np.float32(0.9) * np.ones((), np.float32), "h_zero": np.array(7, np.int8),
    "up": integers(8, 12), "up_scale": np.linspace(0.01, 0.05, 12, dtype=np.float32), "up_zero": integers(12) // 9,
    "kernel": integers(6, 4, 3, 2), "kernel_scale": np.linspace(0.01, 0.05, 6, dtype=np.float32),
    "kernel_zero": np.zeros(6, np.int8), "bias": integers(6, dtype=np.int32) // (1 << 18),
    "one": np.float32(0.02) * np.ones((), np.float32), "zero": np.array(0, np.int8),
}  # fmt: skip
QUANTIZE = node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"])
DEQUANTIZE = node("DequantizeLinear", ["h", "h_scale", "h_zero"], ["y"])
MODELS: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "products": (
        [
            QUANTIZE,
            node("QLinearMatMul", ["q", "x_scale", "x_zero", "up", "up_scale", "up_zero", "h_scale", "h_zero"], ["h"]),
            DEQUANTIZE,
        ],
        (5, 8),
    ),
    "convolutions": (
        [
            QUANTIZE,
            node("QLinearConv", ["q", "x_scale", "x_zero", "kernel", "kernel_scale", "kernel_zero", "h_scale",
                                 "h_zero", "bias"], ["h"], pads=[1, 0, 1, 1]),
            DEQUANTIZE,
        ],
        (2, 4, 9, 5),
    ),
    "weights alone": (
        [
            node("DequantizeLinear", ["up", "up_scale", "up_zero"], ["w"], axis=1),
            node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"]),
        ],
        (5, 8),
    ),
    "dynamic": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            node("MatMulInteger", ["q", "up", "z", "zero"], ["i"]), node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["s", "one"], ["t"]), node("Mul", ["f", "t"], ["y"]),
        ],
        (5, 8),
    ),
    "dynamic convolutions": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            node("ConvInteger", ["q", "kernel", "z", "zero"], ["i"]),
            node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), node("Mul", ["f", "s"], ["y"]),
        ],
        (2, 4, 9, 5),
    ),
}  # fmt: skip


def model(nodes: list[Any], shape: tuple[Any, ...], data: dict[str, Any]) -> Any:
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        nodes, "made", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", *shape[1:]))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in data.items() if name in used],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/1/1"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_standard(name: str, strategy: str) -> None:
    nodes, shape = MODELS[name]
    made = model(nodes, shape, DATA)
    plan = dr.compile(made, strategy=strategy)
    x = RNG.normal(size=shape).astype(np.float32)
    (expected,) = ReferenceEvaluator(made).run(None, {"x": x})
    torch.testing.assert_close(plan(x), torch.from_numpy(np.asarray(expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_zero_points", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 16), (8, 32)])
def test_weights_of_few_bits(bits: int, size: int, has_zero_points: bool) -> None:
    columns, inner = 5, 50
    blocks = -(-inner // size)
    numbers, zeros = (integers(columns, n, dtype=np.uint8) >> (8 - bits) for n in (blocks * size, blocks))
    if not has_zero_points:
        zeros[:] = 1 << (bits - 1)
    scales = RNG.uniform(0.01, 0.1, (columns, blocks)).astype(np.float32)

    def packed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if bits == 8:
            return array
        array = np.pad(array, ((0, 0), (0, array.shape[1] % 2)))
        return array[:, ::2] | array[:, 1::2] << 4

    data = {"b": packed(numbers).reshape(columns, blocks, -1), "scales": scales.reshape(-1)}
    if has_zero_points:
        data["zeros"] = packed(zeros).reshape(-1)
    product = node(
        "MatMulNBits", ["x", *data], ["y"], domain="com.microsoft", K=inner, N=columns, bits=bits, block_size=size
    )
    weight = (numbers.astype(np.float32) - zeros.repeat(size, 1)) * scales.repeat(size, 1)
    x = RNG.normal(size=(3, inner)).astype(np.float32)
    plan = dr.compile(model([product], (3, inner), data), strategy="1/2/1/1")
    torch.testing.assert_close(plan(x), torch.from_numpy(x @ weight[:, :inner].T), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_stay_quantized_if_inputs_may_be_rounded(bits: int) -> None:
    numbers = integers(40, 64, dtype=np.uint8) >> (8 - bits)
    numbers = np.maximum(numbers, 1)
    scales = RNG.uniform(0.01, 0.1, (40, 2)).astype(np.float16).astype(np.float32)
    packed = numbers[:, ::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers
    data = {"b": packed.reshape(40, 2, -1), "scales": scales.reshape(-1)}
    product = node(
        "MatMulNBits", ["x", *data], ["y"], domain="com.microsoft", K=64, N=40, bits=bits, block_size=32,
        accuracy_level=4,
    )  # fmt: skip
    made = model([product], (3, 64), data)
    assert [op.name for op in import_onnx(made).module.main.ops] == ["quantized_linear"]
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    exact = torch.from_numpy(x @ ((numbers.astype(np.float32) - (1 << (bits - 1))) * scales.repeat(32, 1)).T)
    found = dr.compile(made, strategy="1/2/1/1")(x)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()


def test_other_kinds_of_quantization_are_refused() -> None:
    quantized = node("QuantizeLinear", ["x", "x_scale"], ["q"], output_dtype=TensorProto.FLOAT8E4M3FN)
    made = model([quantized, node("DequantizeLinear", ["q", "x_scale"], ["y"])], (2, 3), DATA)
    with pytest.raises(UnsupportedOpError, match=r"float8|FLOAT8"):
        import_onnx(made)
