"""ONNX files, Relax modules and programs compiled in each precision, against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.ir import parse
from distir_relax.kernels.quantized import dequantize, linear, quantize_int4
from distir_relax.precision import convert_program
from tests.frontends.relax_modules import script

LOWEST = float(np.finfo(np.float32).min)
IDS = torch.arange(9) * 3
POSITIONS = torch.arange(9) * 1001
SEEN = torch.rand(9, 128, generator=torch.Generator().manual_seed(0)) > 0.3
SEEN[2] = False
"""Nothing of row 2: its scores are all the lowest number."""


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8


WEIGHTS = {
    "table": drawn(127, 96, seed=1), "w1": drawn(96, 128, seed=2), "b1": drawn(128, seed=3),
    "w2": drawn(127, 128, seed=4), "frequencies": 10000.0 ** (-torch.arange(48) / 48),
}  # fmt: skip


def of_words(dtype: torch.dtype, **weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ONNX file computes, by torch."""
    w = {name: tensor.to(dtype) for name, tensor in (WEIGHTS | weights).items()}
    angles = POSITIONS[:, None].float() * WEIGHTS["frequencies"]
    x = w["table"][IDS] * torch.cat([angles.cos(), angles.sin()], 1).to(dtype)
    hidden = F.relu(x @ w["w1"] + w["b1"])
    scores = (hidden + torch.zeros(9, 128, dtype=dtype).masked_fill(~SEEN, torch.finfo(dtype).min)).softmax(1)
    return F.linear(scores * hidden, w["w2"]).float(), angles


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an embedding, positions that are integers, a mask, and both spellings of a linear layer."""
    weights = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in WEIGHTS.items()]
    constants = {"last": np.array([-1]), "lowest": np.float32(LOWEST), "zero": np.float32(0)}
    weights += [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["words"]),
        node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["floats", "last"], ["column"]),
        node("Mul", ["column", "frequencies"], ["angles"]),
        node("Cos", ["angles"], ["cos"]),
        node("Sin", ["angles"], ["sin"]),
        node("Concat", ["cos", "sin"], ["rotations"], axis=-1),
        node("Mul", ["words", "rotations"], ["x"]),
        node("MatMul", ["x", "w1"], ["product"]),
        node("Add", ["product", "b1"], ["sum"]),
        node("Relu", ["sum"], ["hidden"]),
        node("Where", ["seen", "zero", "lowest"], ["mask"]),
        node("Add", ["hidden", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["scores"], axis=-1),
        node("Mul", ["scores", "hidden"], ["weighted"]),
        node("Gemm", ["weighted", "w2"], ["logits"], transB=1),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "words",
        [info("ids", TensorProto.INT64, [9]), info("positions", TensorProto.INT64, [9]),
         info("seen", TensorProto.BOOL, [9, 128])],
        [info("logits", TensorProto.FLOAT, [9, 127]), info("angles", TensorProto.FLOAT, [9, 48])], weights,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("onnx") / "words.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def types(plan: dr.Plan) -> dict[str, str]:
    return {item.value.name: item.value.tensor.dtype for item in plan.imported.module.main.inputs}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "tail", "backend", "keep"),
    [
        ("1/2/1/1", "ragged", "torch", ()),
        ("1/3/1/1", "pad", "torch", ("w1",)),
        ("1/3/1/1", "pad", "tvm", ()),
    ],
)
def test_an_onnx_file_in_bfloat16(words: Path, strategy: str, tail: str, backend: str, keep: tuple[str, ...]) -> None:
    plan = dr.compile(words, precision="bf16", strategy=strategy, tail=tail, keep=keep, verify=True)
    found = plan(IDS, POSITIONS, SEEN, backend=backend)
    exact, angles = of_words(torch.float32)
    narrow, _ = of_words(torch.bfloat16)
    assert 1e-4 < difference(found["logits"], exact) < 3 * difference(narrow, exact) < 0.03
    # Positions of thousands, and their angles, have all their bits.
    torch.testing.assert_close(found["angles"], angles)
    assert found["logits"].dtype == torch.float32
    kinds = types(plan)
    assert {name: kinds[name] for name in WEIGHTS} == {
        name: "float32" if name in ("frequencies", *keep) else "bfloat16" for name in WEIGHTS
    }


def test_an_onnx_file_with_weights_of_4_bits(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)
    plan = dr.compile(words, precision="int4", strategy="1/3/1/1", tail="pad", verify=True)
    w1, w2 = dequantize(*quantize_int4(WEIGHTS["w1"].T.contiguous())).T, dequantize(*quantize_int4(WEIGHTS["w2"]))
    expected, _ = of_words(torch.float32, w1=w1, w2=w2)
    assert difference(plan(IDS, POSITIONS, SEEN)["logits"], expected) < 1e-5
    assert {name for name in types(plan) if name.endswith(".minimums")} == {"w1.minimums", "w2.minimums"}


RELAX = """
    @R.function
    def main(
        x: R.Tensor((5, 96), "float32"), w1: R.Tensor((127, 96), "float32"), b1: R.Tensor((127,), "float32"),
        w2: R.Tensor((127, 64), "float32"), w3: R.Tensor((31, 64), "float32"),
    ) -> R.Tensor((5, 31), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            t = R.permute_dims(w1)
            h = R.add(R.matmul(x, t), b1)
            y = R.matmul(R.nn.gelu(h), w2)
            o = R.matmul(y, R.permute_dims(w3))
            R.output(o)
        return o
"""
PARAMS = {"w1": drawn(127, 96, seed=5), "b1": drawn(127, seed=6), "w2": drawn(127, 64, seed=7),
          "w3": drawn(31, 64, seed=8)}  # fmt: skip


def of_relax(x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
    """What the Relax function computes, by torch."""
    w = {name: tensor.to(x.dtype) for name, tensor in (PARAMS | weights).items()}
    return (F.gelu(x @ w["w1"].T + w["b1"]) @ w["w2"] @ w["w3"].T).float()


@pytest.mark.parametrize(("strategy", "backend"), [("1/2/1/1", "torch"), ("1/3/1/1", "tvm")])
def test_a_relax_module(strategy: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that it transposes are those of linear layers."""
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)
    module, x = script(RELAX, "\n@I.ir_module(s_tir=True)\nclass Module:\n"), drawn(5, 96, seed=9) * 8

    def run(precision: str, *keep: str) -> tuple[dr.Plan, Any]:
        params: dict[str, Any] = {name: tensor.numpy() for name, tensor in PARAMS.items()}
        plan = dr.compile(module, params=params, precision=precision, keep=keep, strategy=strategy, verify=True)
        return plan, plan(x, backend=backend)

    plan, found = run("bf16", "w3")
    narrow = of_relax(x.bfloat16())
    assert 1e-4 < difference(found, of_relax(x)) < 3 * difference(narrow, of_relax(x)) < 0.03
    assert types(plan) == {"x": "float32", "w1": "bfloat16", "b1": "bfloat16", "w2": "bfloat16", "w3": "float32"}
    plan, found = run("int4")
    rounded = {name: dequantize(*quantize_int4(PARAMS[name])) for name in ("w1", "w3")}
    assert difference(found, of_relax(x, **rounded)) < 1e-5
    assert types(plan)["w3.values"] == "uint8"
    # Its 127 inputs are no groups of 32.
    assert types(plan)["w2"] == "float32"


PROGRAM = """
module @global {
  func @main(input %x: bf16[5,7], parameter %w: bf16[3,7], parameter %c: f16[3]) {
    %y: bf16[5,3] = linear(%x, %w)
    %d: bf16[3] = astype(%c) {dtype="bfloat16"}
    %z: bf16[5,3] = multiply(%y, %d)
    return "z": %z
  }
}
"""


def test_a_program_of_narrow_floats_in_float32() -> None:
    x, w = drawn(5, 7, seed=1).bfloat16(), drawn(3, 7, seed=2).bfloat16()
    scale = torch.tensor([0.1, 1.0, 10.0]).half()
    tensors = {"w": w, "c": scale}
    plan = dr.compile((parse(PROGRAM), tensors), precision="float32", strategy="1/2/1/1", verify=True)
    assert types(plan) == {"x": "bfloat16", "w": "float32", "c": "float32"}
    # Nothing is rounded but the result.
    assert torch.equal(plan(x), (F.linear(x.float(), w.float()) * scale.float()).bfloat16())
    exact = dr.compile((parse(PROGRAM), tensors), strategy="1/1/1/1")(x)
    assert not torch.equal(exact, plan(x))


def test_a_program_without_float32_does_not_change(words: Path) -> None:
    once = convert_program(import_onnx(words), "bfloat16")
    assert convert_program(import_onnx(words), "float32").module == import_onnx(words).module
    assert once.module != import_onnx(words).module
