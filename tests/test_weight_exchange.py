"""Weights of another model of the same shapes, given when a bundle runs: its tokens, and errors of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli.app import app
from distir_relax.errors import BundleError
from distir_relax.serving import start_engine

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
IDS = [5, 3, 117, 8, 1]
COUNT = 12


def saved(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A tiny model with random weights; `model="deepseek"` has experts, and a buffer in its files."""
    deepseek = transformers.DeepseekV3Config(
        vocab_size=127, hidden_size=36, intermediate_size=44, moe_intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, n_routed_experts=5, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, first_k_dense_replace=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=126,
    )  # fmt: skip
    llama = transformers.LlamaConfig(
        vocab_size=127, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=64, bos_token_id=0, eos_token_id=126, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    kinds = {
        "llama": (transformers.LlamaForCausalLM, llama),
        "deepseek": (transformers.DeepseekV3ForCausalLM, deepseek),
    }
    kind, config = kinds[options.pop("model", "llama")]
    model = kind(config)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape))
    # Random models of the usual initial size continue any text alike.
    for parameter in model.parameters():
        parameter.data.mul_(4)
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def tokens_of(folder: Path) -> list[int]:
    """The tokens that transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, eos_token_id=-1
        )
    result: list[int] = found[0, len(IDS) :].tolist()
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, compiled with references and with a copy, and another one in two files of bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    one = saved(folder / "one", 0)
    saved(folder / "two", 1, torch.bfloat16, max_shard_size="30KB")
    assert len([*(folder / "two").glob("*.safetensors")]) > 1
    plan = dr.compile_generation(one, strategy="1/3/1/1").plan
    plan.save(folder / "refer.dist", backends=("torch",))
    plan.save(folder / "copy.dist", backends=("torch",), weights="copy")
    return folder


@pytest.mark.parametrize("bundle", ["refer.dist", "copy.dist"])
def test_tokens_are_those_of_the_other_model(models: Path, bundle: str, tmp_path: Path) -> None:
    own, other = tokens_of(models / "one"), tokens_of(models / "two")
    assert own != other
    path = shutil.copytree(models / bundle, tmp_path / "m.dist")
    assert dr.load(models / bundle).generate(IDS, COUNT).tolist() == own
    # Moved away from its own weights.
    assert dr.load(path, weights=models / "two").generate(IDS, COUNT).tolist() == other
    shown = CliRunner().invoke(
        app, ["generate", str(path), "--tokens", ",".join(map(str, IDS)), "--max-new-tokens", str(COUNT),
              "--weights", str(models / "two")]
    )  # fmt: skip
    assert shown.stdout.split() == list(map(str, other))
    # The file of a bundle has the program's names.
    copy = models / "copy.dist" / "weights.safetensors"
    assert dr.load(path, weights=copy).generate(IDS, COUNT).tolist() == own


@pytest.mark.sweep
def test_experts_and_buffers(tmp_path: Path) -> None:
    one, two = (saved(tmp_path / str(seed), seed, model="deepseek") for seed in (2, 3))
    plan = dr.compile_generation(one, strategy="1/3/1/1").plan
    plan.save(tmp_path / "m.dist", backends=("torch",))
    assert dr.load(tmp_path / "m.dist").generate(IDS, COUNT).tolist() == tokens_of(one)
    elsewhere = {name for file in read_bundle(tmp_path / "m.dist").manifest.weight_files for name in file.tensors}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in elsewhere
    # transformers stacks the experts of the files.
    assert "model.layers.1.mlp.experts.down_proj" not in elsewhere
    with pytest.raises(BundleError, match=r"expected the weight 'model\.layers\.1\.mlp\.experts\.[a-z_]+', found none"):
        dr.load(tmp_path / "m.dist", weights=two)
    stacked = transformers.AutoModelForCausalLM.from_pretrained(two, dtype=torch.float32).state_dict()
    save_file(stacked, tmp_path / "two.safetensors")
    exchanged = dr.load(tmp_path / "m.dist", weights=tmp_path / "two.safetensors")
    assert exchanged.generate(IDS, COUNT).tolist() == tokens_of(two)


@pytest.mark.sweep
@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_sessions_and_servers_on_processes(models: Path) -> None:
    other = tokens_of(models / "two")
    with dr.launch(models / "refer.dist", weights=models / "two") as session:
        assert session.generate(IDS, COUNT).tolist() == other
    with start_engine(read_bundle(models / "refer.dist", weights=models / "two"), launcher="mpirun") as engine:
        assert engine.submit(IDS, COUNT).result() == other


def test_run_and_launch(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 7)
    dr.compile(model, (torch.ones(3, 5),), mesh=1).save(tmp_path / "m.dist", backends=("torch",))
    other = {"weight": torch.full((7, 5), 2.0), "bias": torch.zeros(7)}
    save_file(other, tmp_path / "other.safetensors")
    np.savez(tmp_path / "x.npz", input=np.ones((3, 5), np.float32))
    for command in (["run"], ["launch", "-n", "1"]):
        done = CliRunner().invoke(
            app, [*command, str(tmp_path / "m.dist"), "-i", str(tmp_path / "x.npz"), "-o", str(tmp_path / "y.npz"),
                  "--weights", str(tmp_path / "other.safetensors")]
        )  # fmt: skip
        assert done.exit_code == 0, done.exception
        (found,) = dict(np.load(tmp_path / "y.npz")).values()
        assert (found == 10).all()
        (tmp_path / "y.npz").unlink()


def test_weights_that_do_not_fit(models: Path, tmp_path: Path) -> None:
    tensors = load_file(models / "one" / "model.safetensors")
    file = tmp_path / "other" / "model.safetensors"
    file.parent.mkdir()
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(message: str, changed: dict[str, torch.Tensor], target: Path = file.parent) -> None:
        save_file(changed, file)
        with pytest.raises(BundleError) as error:
            dr.load(models / "refer.dist", weights=target)
        assert message in str(error.value)
        assert "weights of a model with the same config" in str(error.value) or "missing" in message

    refused(f"other: expected the weight '{name}', found none", {k: v for k, v in tensors.items() if k != name})
    shape = f"{file}: expected float32 (44, 36) for the weight '{name}', found "
    refused(f"{shape}float32 (44, 35)", {**tensors, name: torch.zeros(44, 35)})
    refused(f"{shape}float64 (44, 36)", {**tensors, name: torch.zeros(44, 36, dtype=torch.float64)}, file)
    refused(f"{tmp_path}/none: the weights are missing", tensors, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused("empty: expected safetensors files in the folder, found none", tensors, tmp_path / "empty")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(BundleError, match="damaged or half-written: the bytes of"):
        dr.load(models / "refer.dist", weights=file)
    file.rename(tmp_path / "other" / "a.safetensors")
    index = tmp_path / "other" / "model.safetensors.index.json"
    for names, message in (("../a.safetensors", r"\.\./a\.safetensors"), ("b.safetensors", "the weights are missing")):
        index.write_text(json.dumps({"weight_map": {name: names}}))
        with pytest.raises(BundleError, match=message):
            dr.load(models / "refer.dist", weights=tmp_path / "other")


def test_weights_of_a_bundle_with_quantized_ones(models: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=61, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "wide")
    plan = dr.compile_generation(tmp_path / "wide", precision="int4").plan
    plan.save(tmp_path / "m.dist", backends=("torch",))
    with pytest.raises(BundleError, match=r"\.values', found none") as refused:
        dr.load(tmp_path / "m.dist", weights=tmp_path / "wide")
    assert "the bundle has weights of 8 or 4 bits, and these are not" in refused.value.hint
