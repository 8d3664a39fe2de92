"""The first wrong value of a plan: right plans have none, an edited program's op is named with its rank and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Bundle
from distir_relax.cli import app
from distir_relax.errors import DistIRError
from distir_relax.ir import inline, parse
from distir_relax.ops import evaluate
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
