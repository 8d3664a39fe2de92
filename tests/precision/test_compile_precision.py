"""Torch modules compiled in each precision, against torch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli import app
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.kernels.quantized import linear
from distir_relax.precision import WEIGHT_FORMATS
from distir_relax.support.precisions import PRECISION_NAMES, PRECISIONS
from tests.precision.precision_models import QUANTIZE, Mlp, expected, model, results


def error(found: Any, exact: Any) -> float:
    """The largest error of a result, relative to its size."""
    pairs = zip(results(found), results(exact), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def types(plan: dr.Plan) -> dict[str, str]:
    return {item.value.name: item.value.tensor.dtype for item in plan.imported.module.main.inputs}


CASES = [
    ("mlp", "bf16", "1/3/1/1", "ragged", "torch"), ("mlp", "bf16", "1/2/1/1", "pad", "tvm"),
    ("vision", "bf16", "1/2/1/1", "pad", "torch"), ("vision", "bf16", "1/3/1/1", "ragged", "torch"),
    ("words", "bf16", "1/3/1/1", "pad", "torch"), ("words", "bf16", "1/1/2/1", "ragged", "torch"),
    ("words", "bf16", "2/1/1/1", "ragged", "torch"),
    ("mlp", "int8", "1/3/1/1", "pad", "torch"), ("mlp", "int4", "1/2/1/1", "ragged", "tvm"),
    ("mlp", "int8-channel", "1/3/1/1", "pad", "tvm"), ("vision", "int8", "1/2/1/1", "ragged", "torch"),
    ("vision", "int4", "1/3/1/1", "pad", "torch"), ("words", "int4", "1/3/1/1", "ragged", "torch"),
    ("words", "int8", "1/1/3/1", "pad", "torch"), ("words", "int8-channel", "1/2/1/1", "ragged", "torch"),
]  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("name", "precision", "strategy", "tail", "backend"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_are_those_of_torch(
    name: str, precision: str, strategy: str, tail: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inputs of products with quantized weights are not rounded.
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)
    module, inputs = model(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    plan = dr.compile(module, inputs, precision=precision, strategy=strategy, tail=tail, verify=True)
    found = plan(*inputs, backend=backend)
    assert {x.dtype for x in results(found)} == {torch.float32}
    if precision in QUANTIZE:
        assert error(found, expected(name, precision)) < 1e-5
    else:
        exact, narrow = expected(name, "float32"), expected(name, "bf16")
        # Pending sums of ranks are rounded, too.
        assert 1e-4 < error(found, exact) < 3 * error(narrow, exact) < 0.03
        assert error(found, narrow) < 3 * error(narrow, exact)
        assert {types(plan)[name] for name, _ in module.named_parameters()} == {"bfloat16"}
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_precisions_store_fewer_bytes() -> None:
    module, inputs = model("vision")
    sizes = {
        precision: dr.compile(module, inputs, precision=precision, strategy="1/1/1/1").footprint.weights[0]
        for precision in PRECISION_NAMES
    }
    assert sizes["float32"] == sum(p.nbytes for p in module.parameters()) == 2 * sizes["bf16"]
    assert sizes["int4"] < sizes["int8-channel"] < sizes["int8"] < sizes["bf16"]
    assert tuple(WEIGHT_FORMATS) == tuple(name for name in PRECISION_NAMES if name not in PRECISIONS)


def test_kept_weights_compute_in_float32() -> None:
    module, inputs = model("words")
    kept = ("words.weight", "*norm*", "blocks.0.up.*")
    plan = dr.compile(module, inputs, precision="bf16", keep=kept, strategy="1/3/1/1", verify=True)
    for name in plan.imported.names:
        is_kept = name == "words.weight" or "norm" in name or name.startswith("blocks.0.up.")
        if name not in ("ids", "head.weight"):
            assert types(plan)[name] == ("float32" if is_kept else "bfloat16")
    exact = expected("words", "float32")
    assert error(plan(*inputs), exact) < error(expected("words", "bf16"), exact)
    everything = dr.compile(module, inputs, precision="bf16", keep=["*"], strategy="1/1/1/1")
    assert "bfloat16" not in types(everything).values()
    assert torch.equal(
        everything.imported.tensors["blocks.1.down.weight"], module.get_parameter("blocks.1.down.weight")
    )


def test_a_model_of_bfloat16_stays_so() -> None:
    module, inputs = model("mlp")
    narrow = deepcopy(module).bfloat16()
    call = inputs[0].bfloat16(), inputs[1]
    for precision in (None, "bf16"):
        plan = dr.compile(narrow, call, precision=precision, strategy="1/3/1/1")
        assert [x.dtype for x in plan(*call)] == [torch.bfloat16, torch.float32]
        assert types(plan)["x"] == types(plan)["up.weight"] == "bfloat16"
    wide = dr.compile(narrow, call, precision="float32", strategy="1/3/1/1")
    assert error(wide(*call), deepcopy(narrow).float()(call[0].float(), call[1])) < 1e-6


class Computed(nn.Module):
    """Buffers that are not stored: one that the model adds to activations, and frequencies of its own positions."""

    def __init__(self, is_added: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_added = nn.Linear(31, 40), nn.Linear(40, 31), is_added
        self.register_buffer("added", torch.randn(40), persistent=False)
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 41), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(5000, 5000 + len(x))[:, None].float() * self.frequencies.float()
        y = self.first(x) * angles.cos().to(x.dtype)
        return self.second(y + self.added if self.is_added else y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_added", [False, True])
def test_buffers_that_are_not_stored_stay_in_float32_where_the_model_runs_so(is_added: bool) -> None:
    torch.manual_seed(0)
    module, x = Computed(is_added), torch.randn(3, 31)
    plan = dr.compile(module, (x,), precision="bf16", strategy="1/2/1/1", verify=True)
    exact = [deepcopy(module)(x), deepcopy(module).bfloat16()(x.bfloat16())]
    found = error(plan(x), exact[0])
    if is_added:
        assert found < 2 * error(exact[1], exact[0])
    else:
        # Angles of hundreds are wrong in bfloat16.
        assert found < 0.01 < 0.1 < error(exact[1], exact[0])


def test_symbolic_sizes_and_data_of_a_checkpoint(tmp_path: Path) -> None:
    module, (x, flags) = model("mlp")
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Mlp()
    for precision, keep in (("bf16", ["norm*"]), ("int4", ["up.*"])):
        plan = dr.compile(
            empty, (x, flags), precision=precision, keep=keep, checkpoint=tmp_path / "model.safetensors",
            dynamic_shapes={"x": {0: "batch"}, "flags": {0: "batch"}}, strategy="1/3/1/1",
        )  # fmt: skip
        same = dr.compile(module, (x, flags), precision=precision, keep=keep, strategy="1/3/1/1")
        assert error(plan(x, flags), same(x, flags)) < 1e-3
        assert error(plan(x[:3], flags[:3]), [y[:3] for y in same(x, flags)]) < 1e-3


def test_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "precise.py"
    file.write_text(
        "import torch\ndef build():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(96, 127), torch.nn.Linear(127, 5)), (torch.ones(2, 96),)\n"
    )
    target, output = f"{file}:build", str(tmp_path / "x.dist")
    done = CliRunner().invoke(
        app, ["compile", target, "--precision", "int4", "--strategy", "1/2/1/1", "--backend", "torch", "-o", output]
    )
    assert done.exit_code == 0, done.output
    kinds = {weight.name: weight.dtype for weight in read_bundle(tmp_path / "x.dist").manifest.weights}
    assert kinds["0.weight.values"] == "uint8"
    memory = [
        dr.simulate(target, profile="cpu-local", strategy="1/1/1/1", precision=name).peak_memory[0]
        for name in ("float32", "bf16")
    ]
    assert memory[1] < memory[0]
    best = dr.search(target, devices=1, profile="cpu-local", microbatches=(1,), workers=1, precision="bf16").ranked[0]
    assert best.memory == memory[1]
    (tmp_path / "trained.py").write_text(
        "import torch, distir_relax as dr\ndef build():\n    x = torch.ones(2, 3)\n"
        "    return dr.Training(torch.nn.Linear(3, 3), torch.nn.functional.mse_loss, dr.optim.SGD(), (x, x))\n"
    )
    for command in (["search", "--devices", "1"], ["simulate", "--strategy", "1/1/1/1"]):
        arguments = [command[0], f"{tmp_path / 'trained.py'}:build", *command[1:], "--profile", "cpu-local"]
        with pytest.raises(ImportModelError, match="a training has a precision of its own"):
            CliRunner().invoke(app, [*arguments, "--precision", "bf16"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"precision": "int3"}, ImportModelError, "of float32, bf16, int8, int8-channel, int4, found 'int3'"),
        ({"precision": "bf16", "keep": ["up"]}, DistIRError, "no parameter matches 'up' of `keep`"),
        ({"precision": "float32", "keep": ["up.*"]}, ImportModelError, "`keep` needs a precision that changes weights"),
        ({"keep": ["up.*"]}, ImportModelError, "found none"),
        ({"precision": "bf16", "keep": "up.*"}, ImportModelError, "expected a list of patterns"),
        ({"precision": "int8", "keep": ["down*"]}, DistIRError, "no weight of the model can be stored as int8"),
    ],
)
def test_errors_say_what_is_expected(options: Any, kind: type[DistIRError], text: str) -> None:
    module, inputs = model("mlp")
    with pytest.raises(kind, match=text):
        dr.compile(module, inputs, strategy="1/2/1/1", **options)
