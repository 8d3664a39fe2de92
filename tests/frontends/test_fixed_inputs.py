"""Inputs with values that are fixed at compile time: `constants` of ONNX and torch models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.compiler.options import read_constants
from distir_relax.errors import DistIRError, ImportModelError, RunError
from distir_relax.frontends.fixed_inputs import FixedInputs


def rated() -> onnx.ModelProto:
    """At a rate of 16,000 the sum of the operand and the offsets, at others their difference, as voice detectors do."""
    node = helper.make_node
    info = [helper.make_value_info("z", onnx.TypeProto())]
    branches = {
        f"{name}_branch": helper.make_graph([node(op, ["x", "offsets"], ["z"])], name, [], info)
        for name, op in (("then", "Add"), ("else", "Sub"))
    }
    nodes = [node("Equal", ["rate", "fast"], ["is_fast"]), node("If", ["is_fast"], ["y"], **branches)]
    inputs = {"x": (1, ("batch", 4)), "rate": (7, ()), "offsets": (1, (4,))}
    graph = helper.make_graph(
        nodes,
        "rated",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_value_info("y", onnx.TypeProto())],
        [numpy_helper.from_array(np.array(16000), "fast")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_branch_on_an_input_is_decided(rate: int, ranks: int) -> None:
    made, offsets = rated(), np.array([1, -2, 3, 0.5], np.float32)
    constants = {"rate": rate, "offsets": offsets.tolist()}
    plan = dr.compile(made, constants=constants, mesh=ranks, shardings={"x": "S[0]"})
    assert [item.value.name for item in plan.modules["global"].main.inputs if item.role == "input"] == ["x"]
    for batch in (1, 2, 7, 128):
        x = np.random.default_rng(batch).normal(size=(batch, 4)).astype(np.float32)
        feeds = {"x": x, "rate": np.array(rate), "offsets": offsets}
        expected = torch.from_numpy(ReferenceEvaluator(made).run(None, feeds)[0])
        torch.testing.assert_close(plan(x), expected)
        torch.testing.assert_close(plan(x, rate, offsets), expected)
        torch.testing.assert_close(plan(x=x, rate=torch.tensor(rate)), expected)
    with pytest.raises(RunError, match=f"the input 'rate' is {rate} in the compiled model, found 44100"):
        plan(x, rate=44100)
    with pytest.raises(RunError, match="the input 'offsets' is"):
        plan(x, rate, offsets + 1)


def test_constants_must_fit_the_model() -> None:
    with pytest.raises(ImportModelError, match=r"^rated: the model has no input 'sr' to be constant") as raised:
        dr.compile(rated(), constants={"sr": 16000})
    assert raised.value.hint == "its inputs are x, rate, offsets"
    for wrong in ([1, 2], 1.5, "fast"):
        with pytest.raises(ImportModelError, match=r"expected int64 \(\) for the constant 'rate', found"):
            dr.compile(rated(), constants={"rate": wrong})
    with pytest.raises(ImportModelError, match=r"expected float32 \(4\) for the constant 'offsets', found \[1, 2\]"):
        dr.compile(rated(), constants={"rate": 1, "offsets": [1, 2]})
    with pytest.raises(ImportModelError, match="constants are for torch and ONNX models, found tuple"):
        dr.compile((dr.compile(rated(), constants={"rate": 1}, mesh=1).modules["global"], {}), constants={"rate": 1})
    with pytest.raises(DistIRError, match="which branch runs depends on data"):
        dr.compile(rated())


def test_values_fill_open_dims() -> None:
    fixed = FixedInputs({"a": 2, "b": [True, False]}, "m")
    assert fixed.tensor("a", "float32", (2, -1)).tolist() == [[2.0], [2.0]]
    assert fixed.tensor("a", "int32", None).tolist() == 2
    assert fixed.tensor("b", "bool", (-1,)).tolist() == [True, False]
    assert fixed.tensor("b", "int64", (2,)).dtype == torch.int64
    with pytest.raises(ImportModelError, match=r"expected bool \(any, 1\) for the constant 'b', found \[True, False\]"):
        fixed.tensor("b", "bool", (-1, 1))


def test_values_on_the_command_line() -> None:
    texts = ["sr=16000", "scale=-0.5", "training=false", "sizes=1,2.5", "on=true"]
    assert read_constants(texts) == {"sr": 16000, "scale": -0.5, "training": False, "sizes": [1, 2.5], "on": True}
    for wrong in ("sr", "sr=", "=1", "sr=fast", "sr=1,,2"):
        with pytest.raises(ImportModelError, match=r"expected NAME=NUMBER, true, false, or numbers"):
            read_constants([wrong])


def test_the_command_line_fixes_inputs_and_dims(tmp_path: Path) -> None:
    made, x = rated(), np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    onnx.save(made, str(tmp_path / "rated.onnx"))
    np.savez(tmp_path / "x.npz", x=x)

    def distir(*arguments: object) -> None:
        app([str(a) for a in arguments], standalone_mode=False)

    distir(
        *("compile", tmp_path / "rated.onnx", "--dim", "batch=1:64", "--constant", "rate=16000"),
        *(
            "--constant",
            "offsets=1,2,3,4",
            "--mesh",
            2,
            "--shard",
            "x=S[0]",
            "-o",
            tmp_path / "out",
            "--backend",
            "torch",
        ),
    )
    distir("run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], x + np.arange(1, 5, dtype=np.float32))
    loaded = dr.load(tmp_path / "out")
    torch.testing.assert_close(loaded(x[:3], rate=16000), torch.from_numpy(x[:3] + np.arange(1, 5, dtype=np.float32)))
    with pytest.raises(RunError, match="'rate' was 16000 when the model was compiled, found 8000"):
        loaded(x, rate=8000)
    with pytest.raises(RunError, match="expected batch of at least 1 and at most 64, found 65"):
        loaded(np.zeros((65, 4), np.float32))


class Scaled(torch.nn.Module):
    """Takes a tensor, and numbers on which control flow depends."""

    def forward(self, offset: torch.Tensor, x: torch.Tensor, rate: int = 8000, scale: Any = 1.0) -> torch.Tensor:
        return (x * 2 if rate == 16000 else x) * scale + offset


@pytest.mark.parametrize("ranks", [1, 2])
def test_arguments_of_torch_models(ranks: int) -> None:
    torch.manual_seed(0)
    x, offset = torch.randn(3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    example = {"x": x, "offset": torch.zeros(4)}
    constants = {"offset": offset.tolist(), "rate": 16000, "scale": 0.5}
    plan = dr.compile(Scaled(), (), example, constants=constants, mesh=ranks, shardings={"x": "S[0]"})
    assert [item.value.name for item in plan.modules["global"].main.inputs if item.role == "input"] == ["x"]
    for call in ({}, {"offset": offset}, {"rate": 16000, "scale": 0.5}, {"offset": offset.numpy()}):
        torch.testing.assert_close(plan(x=x, **call), x + offset)
    torch.testing.assert_close(plan(offset, x, 16000, 0.5), x + offset)
    for wrong in ({"offset": offset + 1}, {"rate": 8000}, {"scale": "half"}):
        (name,) = wrong
        with pytest.raises(RunError, match=f"the input '{name}' is"):
            plan(x=x, **wrong)
    with pytest.raises(ImportModelError, match="Scaled: the model has no input 'sr' to be constant"):
        dr.compile(Scaled(), (), example, constants={"sr": 1})
    with pytest.raises(ImportModelError, match=r"expected float32 \(4\) for the constant 'offset'"):
        dr.compile(Scaled(), (), example, constants={"offset": [1.0, 2.0]})
    with pytest.raises(ImportModelError, match=r"the example does not fit Scaled\.forward"):
        dr.compile(Scaled(), (), {"x": x}, constants={"rate": 16000})


def test_a_saved_torch_model_checks_its_constants(tmp_path: Path) -> None:
    x, offset = torch.randn(3, 4), torch.zeros(4)
    plan = dr.compile(Scaled(), (offset, x), constants={"offset": 2.0, "rate": 16000}, mesh=1)
    plan.save(tmp_path / "out", backends=("torch",))
    loaded = dr.load(tmp_path / "out")
    torch.testing.assert_close(loaded(x=x), 2 * x + 2)
    torch.testing.assert_close(loaded(x=x, rate=16000, offset=2.0), 2 * x + 2)
    with pytest.raises(RunError, match="'rate' was 16000 when the model was compiled, found 8000"):
        loaded(x=x, rate=8000)
