"""The first wrong value of a plan: right plans have none, an edited program's op is named with its rank and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Bundle, write_bundle
from distir_relax.bundle.weights import TensorWeights
from distir_relax.cli import app
from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, inline, parse
from distir_relax.ops import TABLE, Attrs, Cost, Semantics, Split, Types, aten, evaluate, operands
from distir_relax.runtime.backends import register_backend
from distir_relax.runtime.backends.weights import load_weights
from distir_relax.runtime.communicator import Communicator
from tests.proof.test_projection import plan

X = torch.randn(6, 11, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["tensor", "tensor, padded", "data", "pipeline"])
def test_a_right_plan_has_no_wrong_value(name: str) -> None:
    bundle = plan(name).bundle(("torch",))
    result = dr.bisect(bundle, {"x": X})
    assert result.is_right, result
    assert result.values > 20


def test_an_edited_op_is_named() -> None:
    bundle = plan("pipeline").bundle(("torch",))
    path = bundle.manifest.program_of(1).torch
    assert path is not None
    text = bundle.programs[path]
    assert "1.1920928955078125e-07" in text
    programs = {**bundle.programs, path: text.replace("1.1920928955078125e-07", "0.01", 1)}
    result = dr.bisect(replace(bundle, programs=programs), {"x": X})
    assert result.wrong is not None
    assert result.wrong.ranks == (1,)
    assert result.wrong.cause == "execution"
    assert "nn.rms_norm" in result.wrong.op
    assert result.wrong.location.startswith("blocks.1.norm, ")


class Faulty:
    """A rank's program, op by op; on rank 1 one op is off by a thousandth."""

    def __init__(self, bundle: Bundle, comm: Communicator, weights: dict[str, torch.Tensor]) -> None:
        ranked = inline(parse(bundle.stage("ranked")))
        self.function = ranked.function(ranked.ranks[comm.rank])
        self.comm, self.weights = comm, weights
        self.state: dict[str, torch.Tensor] = {}
        self.held: set[int] = set()
        self.steps: dict[int, str] = {}
        product = next(op for op in self.function.ops if "linear" in op.name)
        self.wrong = product.results[0].name if comm.rank == 1 else ""

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        names = [item.value.name for item in self.function.inputs if item.role == "input"]
        values = {**self.weights, **dict(zip(names, inputs, strict=True))}
        for op in self.function.ops:
            results = evaluate(op, [values[v.name] for v in op.operands], self.comm)
            values.update(zip((v.name for v in op.results), results, strict=True))
            if op.results[0].name == self.wrong:
                values[self.wrong] = results[0] * 1.001
        return [values[output.value.name] for output in self.function.outputs]


def test_a_backend_that_is_wrong_on_one_rank_is_named() -> None:
    register_backend(
        "faulty", lambda bundle, rank, comm, device: Faulty(bundle, comm, load_weights(bundle, rank, device))
    )
    bundle = plan("tensor").bundle(("torch",))
    result = dr.bisect(bundle, {"x": X}, backend="faulty")
    assert result.wrong is not None
    assert result.wrong.ranks == (1,)
    assert result.wrong.location.startswith("blocks.0")


@pytest.mark.sweep
def test_backends_agree() -> None:
    bundle = plan("tensor").bundle(("torch", "tvm"))
    result = dr.bisect(bundle, {"x": X}, backend="tvm", against_backend="torch")
    assert result.is_right, result


def test_the_command(tmp_path: Path) -> None:
    path = plan("tensor").save(tmp_path / "m.dist", backends=("torch",))
    np.savez(tmp_path / "x.npz", x=X.numpy())
    run = CliRunner()
    done = run.invoke(app, ["bisect", str(path), "--input", str(tmp_path / "x.npz")])
    assert done.exit_code == 0, done.output
    assert "right: " in done.output
    done = run.invoke(app, ["bisect", str(path), "--input", str(tmp_path / "x.npz"), "--json"])
    assert json.loads(done.output)["is_right"] is True
    np.savez(tmp_path / "other.npz", y=X.numpy())
    refused = run.invoke(app, ["bisect", str(path), "--input", str(tmp_path / "other.npz")])
    assert isinstance(refused.exception, DistIRError), refused.output


class Outer(nn.Module):
    """A sum over an outer product."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.outer(a, b) * 2).tanh()


def define_outer(code: str) -> None:
    """Define an op of a user, as `examples/extend/add_op.py` does, with other code."""

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        return (TensorType((*types[0].shape, *types[1].shape), types[0].dtype),)

    semantics = Semantics(infer=infer, torch=code, linear=(operands(0), operands(1)))
    dr.define_op("outer", semantics, Split("m, n -> m n"), cost=Cost(flops=lambda types, attrs, results: 0.0))
    aten("outer.default")(lambda g, a, b: g.emit("outer", a, b))


@pytest.mark.parametrize(
    ("code", "ranks"),
    [
        ("torch.outer({0}, {1})", ()),
        # Of the parts 3|2|2 of seven rows, those of two.
        ("torch.outer({0}, {1}) * (1.001 if {0}.shape[0] == 2 else 1.0)", (1, 2)),
        ("torch.outer({0}, {1}) * (1.001 if {0}.shape[0] == 3 else 1.0)", (0,)),
    ],
)
def test_an_op_of_a_user_is_named(code: str, ranks: tuple[int, ...]) -> None:
    """Code that is wrong for some sizes is right on the whole tensor: the op, the ranks and the line are named."""
    a, b = torch.linspace(0.5, 2.0, 7), torch.linspace(-1.0, 1.0, 5)
    with TABLE.extended():
        define_outer(code)
        bundle = dr.compile(Outer(), (a, b), mesh=3, shardings={"a": "S[0: 3|2|2]"}).bundle(("torch",))
        result = dr.bisect(bundle, {"a": a, "b": b})
    if not ranks:
        assert result.is_right, result
        return
    assert result.wrong is not None
    assert "= outer(%a, %b)" in result.wrong.op
    assert result.wrong.ranks == ranks
    assert result.wrong.location.startswith("test_bisect.py:")
    assert result.wrong.cause == "definition"
    assert result.wrong.found == pytest.approx(1.001 * result.wrong.expected, rel=1e-6)


class Layers(nn.Module):
    """Three layers, of which a plan stores the weights in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_with_bad_weights_is_ranked_first(tmp_path: Path, layer: int) -> None:
    """The scales of a layer's outputs are wrong; the bundle is written with its checksums, which are right."""
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(5, 160)
    cut = "S[0: 64|64|32]"
    exact = dr.compile(model, (x,), mesh=3, shardings={"layers.*.weight": cut})
    exact_path = exact.save(tmp_path / "float.dist", backends=("torch",))
    plan = dr.compile(model, (x,), precision="int8-channel", mesh=3, shardings={"layers.*.weight.values": cut})
    bundle = plan.bundle(("torch",))
    name = f"layers.{layer}.weight.scales"
    tensors = {w.name: bundle.weights.read(w.name, [[(0, n)] for n in w.shape]) for w in bundle.manifest.weights}
    good = write_bundle(bundle, tmp_path / "good.dist")
    tensors[name] = 1.5 * tensors[name]
    bad = write_bundle(replace(bundle, weights=TensorWeights(tensors)), tmp_path / "int8.dist")
    np.savez(tmp_path / "x.npz", x=x.numpy())
    command = ["bisect", str(bad), "--input", str(tmp_path / "x.npz"), "--against", str(exact_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["errors"]
    assert rows[0]["location"].startswith(f"layers.{layer}, ")
    assert rows[0]["added"] > 0.3
    others = dr.bisect(good, tmp_path / "x.npz", against=exact_path).errors
    assert max(row.added for row in others) < 0.05
