"""Folders that `save_pretrained` wrote: compiled, run, and compared with the model that transformers reads."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import ImportModelError, UnsupportedOpError
from distir_relax.frontends.pretrained import TASKS, is_pretrained, read_pretrained

SIZES = {
    "num_hidden_layers": 1, "vocab_size": 97, "hidden_size": 30, "intermediate_size": 41, "num_attention_heads": 3,
    "max_position_embeddings": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights; that of `bert` in several files."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=3))
    llama.save_pretrained(folder / "llama")
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=5))
    bert.save_pretrained(folder / "bert", max_shard_size="12KB")
    assert len([*(folder / "bert").glob("*.safetensors")]) > 1
    t5 = transformers.T5Config(num_layers=1, d_model=30, d_ff=41, d_kv=10, num_heads=3, vocab_size=97)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    vit = {"num_hidden_layers": 1, "hidden_size": 30, "intermediate_size": 41, "num_attention_heads": 3}
    images = transformers.ViTConfig(**vit, image_size=16, patch_size=8)
    transformers.ViTForImageClassification(images).save_pretrained(folder / "vit")
    transformers.RobertaModel(transformers.RobertaConfig(**SIZES)).save_pretrained(folder / "roberta")
    return folder


def distir(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def run(bundle: Path, **inputs: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    np.savez(bundle.with_name("x.npz"), **inputs)
    done = distir("run", bundle, "-i", bundle.with_name("x.npz"), "-o", bundle.with_name("y.npz"))
    assert done.exit_code == 0, done.output
    return dict(np.load(bundle.with_name("y.npz")))


def test_a_causal_model(models: Path, tmp_path: Path) -> None:
    done = distir(
        "compile", models / "llama", "-o", tmp_path / "m.dist", "--strategy", "1/3/1/1", "--batch", 2, "--sequence", 11,
        "--backend", "torch",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    ids = np.random.default_rng(0).integers(0, 97, (2, 11))
    expected = transformers.LlamaForCausalLM.from_pretrained(models / "llama")(torch.from_numpy(ids)).logits
    np.testing.assert_allclose(run(tmp_path / "m.dist", input_ids=ids)["logits"], expected.detach(), atol=1e-5)


def test_a_classifier_in_several_files(models: Path, tmp_path: Path) -> None:
    done = distir(
        "compile", models / "bert", "-o", tmp_path / "m.dist", "--strategy", "3/1/1/1", "--batch", 3, "--sequence", 7,
        "--backend", "torch",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    ids = np.random.default_rng(0).integers(0, 97, (3, 7))
    mask = np.tril(np.ones((3, 7), np.int64), 4)
    model = transformers.BertForSequenceClassification.from_pretrained(models / "bert").eval()
    expected = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
    found = run(tmp_path / "m.dist", input_ids=ids, attention_mask=mask)["logits"]
    np.testing.assert_allclose(found, expected.detach(), atol=1e-5)


def test_an_encoder_takes_any_batch_and_length(models: Path, tmp_path: Path) -> None:
    done = distir(
        "compile", models / "bert", "-o", tmp_path / "m.dist", "--strategy", "1/3/1/1", "--backend", "torch",
        "--dim", "sequence=1:24",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    model = transformers.BertForSequenceClassification.from_pretrained(models / "bert").eval()
    for rows, length in ((1, 1), (5, 24), (2, 9)):
        ids = np.random.default_rng(rows).integers(0, 97, (rows, length))
        mask = np.tril(np.ones((rows, length), np.int64), 4)
        expected = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
        found = run(tmp_path / "m.dist", input_ids=ids, attention_mask=mask)["logits"]
        np.testing.assert_allclose(found, expected.detach(), atol=1e-5)


def test_symbolic_dims_of_folders(models: Path) -> None:
    def dims(name: str, *options: Any) -> dict[str, Any]:
        found = read_pretrained(models / name, None, *options)
        sizes = {key: list(x.shape) for key, x in found.inputs.items() if key in found.dynamic_shapes}
        return {key: (sizes[key], [s and (s.name, s.high) for s in found.dynamic_shapes[key]]) for key in sizes}

    assert dims("bert")["attention_mask"] == ([2, 24], [("batch", None), ("sequence", 24)])
    assert dims("bert", 3)["input_ids"] == ([3, 24], [None, ("sequence", 24)])
    assert dims("bert", 3, 5) == {}
    assert dims("bert", 3, 5, {"batch": (1, 8)})["input_ids"] == ([3, 5], [("batch", None), None])
    assert dims("bert", None, None, {"sequence": (2, 7)})["input_ids"][0] == [2, 7]
    # Positions start after that of padding, which is 1.
    assert dims("roberta")["input_ids"] == ([2, 22], [("batch", None), ("sequence", 22)])
    assert dims("llama") == {}
    assert dims("llama", None, None, {"batch": (4, None)}) == {"input_ids": ([4, 24], [("batch", None), None])}
    assert dims("t5", None, 9, {"batch": 4})["decoder_input_ids"] == ([2, 9], [("batch", None), None])
    assert dims("vit") == {}
    assert dims("vit", None, None, {"batch": (1, 8)}) == {"pixel_values": ([2, 3, 16, 16], [("batch", None)])}


def test_tasks_and_their_inputs(models: Path) -> None:
    found = read_pretrained(models / "bert", "feature-extraction", batch=2)
    assert type(found.model) is transformers.BertModel
    assert not found.model.training
    assert {name: x.shape for name, x in found.inputs.items() if name != "use_cache"} == {
        "input_ids": (2, 24), "attention_mask": (2, 24)
    }  # fmt: skip
    assert found.inputs["use_cache"] is False
    t5 = read_pretrained(models / "t5").inputs
    assert (t5["input_ids"].shape, t5["decoder_input_ids"].shape) == ((1, 128), (1, 128))
    assert read_pretrained(models / "vit", batch=5).inputs["pixel_values"].shape == (5, 3, 16, 16)
    assert all(hasattr(transformers, name) for name in TASKS.values())
    assert not is_pretrained(models)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"task": "sequence-classification"}, "no weights for score.weight of LlamaForSequenceClassification"),
        ("llama", {"task": "translation"}, "--task: expected one of causal-lm, .*, found 'translation'"),
        ("llama", {"sequence": 25}, "takes at most 24 positions, found --sequence 25"),
        ("vit", {"sequence": 3}, "the model takes images, which have no --sequence"),
        ("vit", {"dims": {"sequence": (1, 9)}}, "the model takes images, which have no --dim sequence"),
        ("bert", {"dims": {"length": (1, 9)}}, "the model has no dim 'length'\n  hint: its dims are batch, sequence"),
        ("bert", {"dims": {"sequence": (1, 25)}}, "takes at most 24 positions, found --dim sequence up to 25"),
        (
            "t5",
            {"task": "causal-lm"},
            "has no AutoModelForCausalLM of the type 't5'\n.*saved as T5ForConditionalGeneration",
        ),
    ],
)
def test_what_a_folder_is_not(models: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        read_pretrained(models / name, **options)


def test_vision_language_models(tmp_path: Path) -> None:
    vision = {"num_hidden_layers": 1, "hidden_size": 30, "intermediate_size": 41, "num_attention_heads": 3}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**SIZES),
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    message = (
        "found a vision-language model, which transformers loads as LlavaForConditionalGeneration\n.*images are not"
    )
    for options in (("--generate",), ("--task", "causal-lm"), ("--task", "sequence-classification")):
        done = distir("compile", tmp_path / "llava", "-o", tmp_path / "m.dist", *options)
        assert isinstance(done.exception, ImportModelError)
        assert re.search(message, str(done.exception))
    with pytest.warns(
        UserWarning, match="LlavaForConditionalGeneration is compiled for tokens alone, without pixel_val"
    ):
        assert read_pretrained(tmp_path / "llava").inputs.keys() == {"input_ids"}
    inputs = {"input_ids": torch.tensor([[1, 2, 7, 7, 7, 7, 3]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    config.image_token_id = 7
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedOpError, match="hint: models of text and images are imported for token ids alone"):
        dr.compile(model, (), {**inputs, "use_cache": False}, mesh=1)


def test_folders_of_adapters(tmp_path: Path) -> None:
    """peft saves no model: every command says how to merge them into one."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    commands = (
        ("compile", "-o", tmp_path / "m.dist"), ("compile", "--generate", "-o", tmp_path / "m.dist"), ("serve",),
        ("generate", "--prompt", "a"),
        ("search", "--devices", 2, "--profile", "dgx2-v100", "--prompt", 5, "--generate", 3),
    )  # fmt: skip
    for name, *options in commands:
        done = distir(name, tmp_path, *options)
        assert isinstance(done.exception, ImportModelError)
        assert "expected a model, found adapters of peft for org/base" in str(done.exception)
        assert "from_pretrained('org/base')" in (done.exception.hint or "")
    # Beside the model they were saved with they are left out.
    (tmp_path / "config.json").write_text("{}")
    assert is_pretrained(tmp_path)


def test_damaged_folders(models: Path, tmp_path: Path) -> None:
    def changed(**fields: object) -> Path:
        folder = tmp_path / f"m{len([*tmp_path.iterdir()])}"
        shutil.copytree(models / "llama", folder)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != ""}))
        return folder

    for folder, message in (
        (changed(architectures=["NoSuchModel"]), "has no model 'NoSuchModel'"),
        (changed(architectures=["logging"]), "has no model 'logging'"),
        (changed(architectures=""), "the configuration names no architecture"),
        (changed(architectures=7), "architectures"),
        (changed(hidden_size=33), r"expected \(97, 33\) for lm_head.weight, found \(97, 30\)"),
    ):
        with pytest.raises(ImportModelError, match=message):
            read_pretrained(folder)
    with pytest.raises(ImportModelError, match="transformers cannot read the model: "):
        read_pretrained(changed(model_type="no-such-type"), "causal-lm")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ImportModelError, match="transformers cannot read the model: "):
        read_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ImportModelError, match="expected weights in safetensors files, found none"):
        read_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ImportModelError, match=r"config\.json"):
        read_pretrained(folder)


def test_without_transformers_the_error_says_what_to_install(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportModelError, match=r"cannot be imported: .*\n  hint: pip install transformers"):
        read_pretrained(models / "llama")


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        ("llama", ("--ranks", 3), "--ranks cannot be applied to a folder of a model"),
        ("llama", ("--train",), "--train cannot be applied to a folder of a model"),
        ("llama", ("--input-shape", "x=3"), "--input-shape cannot be applied to a folder of a model"),
        ("", (), "expected config.json of a model in the folder, found none"),
        ("model.py:build", ("--task", "causal-lm"), "--task is only for folders written by save_pretrained"),
    ],
)
def test_options_that_do_not_fit(models: Path, tmp_path: Path, target: str, option: Any, message: str) -> None:
    (models / "model.py").write_text("def build(): pass\n")
    done = distir("compile", models / target, "-o", tmp_path / "m.dist", *option)
    assert isinstance(done.exception, ImportModelError)
    assert message in str(done.exception)
