"""Models compiled in another precision: as transformers loads them with ``dtype=``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli import app
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.precision import with_precision
from distir_relax.runtime.requests import Slot, ThreadRequests
from distir_relax.support.precisions import PRECISIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped model with tied embeddings, in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=127, hidden_size=48, intermediate_size=65, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("precision") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/1/1", "1/1/2/1"])
def test_a_folder_in_bfloat16(folder: Path, strategy: str) -> None:
    """Logits differ from those of float32 as those of transformers in bfloat16 do, and the same tokens follow."""
    generation = dr.compile_generation(folder, precision="bf16", strategy=strategy)
    bundle = generation.plan.bundle(("torch",))
    kinds = {weight.name: weight.dtype for weight in bundle.manifest.weights}
    assert {kinds.pop(name) for name in list(kinds) if "inv_freq" in name} <= {"float32"}
    assert set(kinds.values()) == {"bfloat16"}
    ids = torch.tensor(PROMPT)
    theirs = loaded(folder, torch.bfloat16)
    with torch.no_grad():
        exact = loaded(folder, torch.float32)(ids, use_cache=False).logits[:, -1]
        expected = theirs(ids, use_cache=False).logits[:, -1].float()
    found = _logits(generation, ids)
    error, allowed = (found - exact).abs().max(), (expected - exact).abs().max()
    assert 0 < error < 2 * allowed
    assert generation.generate(PROMPT, 5).shape == (1, 5)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("named", [True, False], ids=["config", "files"])
@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "bf16"), ("float32", "float32"), ("float16", "float32")])
def test_a_folder_keeps_its_precision(folder: Path, tmp_path: Path, dtype: str, expected: str, named: bool) -> None:
    """That of its configuration, or of its weights where an older transformers wrote none; and the command says so."""
    stored = tmp_path / "stored"
    loaded(folder, getattr(torch, dtype)).save_pretrained(stored)
    if not named:
        config = json.loads((stored / "config.json").read_text())
        del config["dtype"]
        (stored / "config.json").write_text(json.dumps(config))
    generation = dr.compile_generation(stored, strategy="1/3/1/1")
    assert (generation.precision, generation.stored) == (expected, dtype)
    ids = torch.tensor(PROMPT)
    given = dr.compile_generation(stored, precision=expected, strategy="1/3/1/1")
    assert torch.equal(_logits(generation, ids), _logits(given, ids))
    weights = generation.plan.bundle(("torch",)).manifest.weights
    assert {weight.dtype for weight in weights if "inv_freq" not in weight.name} == {PRECISIONS[expected]}
    command = ["compile", str(stored), "--generate", "--backend", "torch", "-o", str(tmp_path / "a.dist")]
    ran = CliRunner().invoke(app, command)
    assert f"precision {expected} for weights of {dtype}; --precision chooses another" in ran.output
    ran = CliRunner().invoke(app, [*command, "--precision", "float32"])
    assert ran.exit_code == 0
    assert "for weights of" not in ran.output


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "bf16"), ("float32", "float32"), ("float16", "float16")])
def test_command_says_the_precision_of_a_folder_without_generation(
    folder: Path, tmp_path: Path, dtype: str, expected: str
) -> None:
    loaded(folder, getattr(torch, dtype)).save_pretrained(tmp_path / "stored")
    command = [
        "compile",
        str(tmp_path / "stored"),
        "--sequence",
        "5",
        "--backend",
        "torch",
        "-o",
        str(tmp_path / "a.dist"),
    ]
    line = f"precision {expected} for weights of {dtype}; --precision chooses another"
    assert line in CliRunner().invoke(app, command).output
    ran = CliRunner().invoke(app, [*command, "--precision", "float32"])
    assert ran.exit_code == 0
    assert "for weights of" not in ran.output


def test_quantized_weights_of_a_bfloat16_folder_compute_in_float32(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=32, intermediate_size=33, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    generation = dr.compile_generation(tmp_path, precision="int8")
    assert (generation.precision, generation.stored) == ("int8", "bfloat16")
    kinds = {weight.dtype for weight in generation.plan.bundle(("torch",)).manifest.weights}
    assert kinds == {"float32", "int8", "float16"}


def _logits(generation: dr.Generation, ids: torch.Tensor) -> torch.Tensor:
    ranks = ThreadRequests(generation.plan.bundle(("torch",)))
    logits = ranks.logits([Slot(0, 0, ids[0].tolist(), 1, ids.shape[1])])
    ranks.close()
    return logits.float()


def test_a_module_is_copied_and_a_folder_gives_the_same(folder: Path) -> None:
    model = loaded(folder, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generation = dr.compile_generation(model, precision="bf16", strategy="1/1/1/1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    ids = torch.tensor(PROMPT)
    of_folder = dr.compile_generation(folder, precision="bf16", strategy="1/1/1/1")
    assert torch.equal(_logits(generation, ids), _logits(of_folder, ids))
    own = dr.compile_generation(loaded(folder, torch.bfloat16), strategy="1/1/1/1")
    assert torch.equal(_logits(generation, ids), _logits(own, ids))


def test_ties_and_buffers_of_a_copy(folder: Path) -> None:
    model = loaded(folder, torch.float32)
    copied: Any = with_precision(model, "bf16")
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight.dtype == torch.bfloat16
    assert copied.model.rotary_emb.inv_freq.dtype == torch.float32
    norm = torch.nn.BatchNorm1d(5)
    stored: Any = with_precision(norm, "bf16")
    assert (stored.running_mean.dtype, stored.num_batches_tracked.dtype) == (torch.bfloat16, torch.int64)
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == torch.float32
    assert with_precision(model, "float32") is model


def test_the_command(folder: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        app,
        [
            "compile",
            str(folder),
            "--generate",
            "--precision",
            "bf16",
            "--strategy",
            "1/1/1/1",
            "-o",
            str(tmp_path / "a.dist"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    bundle = read_bundle(tmp_path / "a.dist")
    assert sum(weight.dtype == "bfloat16" for weight in bundle.manifest.weights) > 15
    with pytest.raises(ImportModelError, match="of float32, bf16, int8, int8-channel, int4, found 'int3'"):
        dr.compile_generation(folder, precision="int3")


def test_simulation_and_search_have_the_weights_of_a_precision(folder: Path) -> None:
    workload: dict[str, Any] = {"profile": "dgx2-v100", "prompt": 5, "generate": 3}
    wide, narrow = (
        dr.simulate_generation(folder, precision=precision, **workload).weights[0] for precision in ("float32", "bf16")
    )
    assert wide / 2 < narrow < 0.52 * wide
    found = dr.search_generation(folder, devices=1, requests=1, precision="bf16", keep=["*norm*"], **workload)
    assert found.ranked[0].simulation is not None
    assert narrow < found.ranked[0].simulation.weights[0] < wide
    generation = dr.compile_generation(folder)
    with pytest.raises(DistIRError, match="a precision cannot be applied to a model that is compiled already"):
        dr.simulate_generation(generation, precision="bf16", **workload)
    search = ["search", str(folder), "--devices", "1", "--profile", "dgx2-v100", "--prompt", "5", "--generate", "3"]
    ran = CliRunner().invoke(app, [*search, "--precision", "int9"])
    assert ran.exit_code == 2


def test_kept_weights_of_a_folder_are_those_of_its_files(folder: Path) -> None:
    """Norms compute in float32; the logits are as close to those of float32."""
    keep = ("*norm*", "model.embed_tokens.weight")
    generation = dr.compile_generation(folder, precision="bf16", keep=keep, strategy="1/3/1/1")
    kinds = {weight.name: weight.dtype for weight in generation.plan.bundle(("torch",)).manifest.weights}
    kept = {name for name, dtype in kinds.items() if dtype == "float32" and "inv_freq" not in name}
    assert kept == {name for name in kinds if "norm" in name or "embed_tokens" in name}
    module = dr.compile_generation(loaded(folder, torch.float32), precision="bf16", keep=keep, strategy="1/3/1/1")
    ids = torch.tensor(PROMPT)
    assert torch.equal(_logits(generation, ids), _logits(module, ids))
    with torch.no_grad():
        exact = loaded(folder, torch.float32)(ids, use_cache=False).logits[:, -1]
        narrow = loaded(folder, torch.bfloat16)(ids, use_cache=False).logits[:, -1].float()
    assert (_logits(generation, ids) - exact).norm() < (narrow - exact).norm()
