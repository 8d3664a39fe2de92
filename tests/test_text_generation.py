"""Text in, text out: model folders compiled by the command, and the text of transformers' `generate`, on any ranks."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli.app import app
from distir_relax.errors import BundleError, DistIRError, ImportModelError, RunError
from distir_relax.frontends.pretrained_language_model import read_language_model
from distir_relax.text import Tokenizer
from tests.runtime.processes import mpirun
from tests.tokenizers_of_tests import of_bytes, of_pieces, of_transformers

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
LENGTH = 128
PROMPT = "how do I bake bread?"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
# The tokenizer ends a reply with token 3; the model's own stop token is another one.
END = 277


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights, a tokenizer, and a chat template; those of `llama` in two parts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    options = {"hidden_size": 30, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 3,
               "num_key_value_heads": 3, "max_position_embeddings": LENGTH, "vocab_size": 311}  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, bos_token_id=0, eos_token_id=1))
    llama.generation_config.eos_token_id = [1, END]
    llama.to(torch.bfloat16).save_pretrained(folder / "llama", max_shard_size="60KB")
    assert len([*(folder / "llama").glob("*.safetensors")]) == 2
    gpt2 = transformers.GPT2Config(
        n_layer=1, n_head=3, n_embd=24, vocab_size=411, n_positions=LENGTH, bos_token_id=0, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    of_transformers(of_bytes()).save_pretrained(folder / "llama")
    of_transformers(of_pieces()).save_pretrained(folder / "gpt2")
    return folder


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """The model in float32 and the tokenizer, as transformers reads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def of_transformers_library(folder: Path, prompt: Any, count: int, **options: Any) -> str:
    """The text that transformers generates after a text or a chat: that of all tokens without that of the prompt."""
    model, tokenizer = loaded(folder)
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt").input_ids
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **options
        )
    before, after = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (ids[0], found[0]))
    assert after.startswith(before)
    return str(after.removeprefix(before))


def distir(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def bundles(folders: Path) -> dict[str, Path]:
    """The folders, compiled by the command, with the default length."""
    for name, strategy in (("llama", "1/2/1/1"), ("gpt2", "1/1/1/1")):
        done = distir("compile", folders / name, "--generate", "--strategy", strategy, "--max-batch", 3,
                      "--precision", "float32", "-o", folders / f"{name}.dist", "--backend", "torch")  # fmt: skip
        assert done.exit_code == 0, done.exception
        assert re.search(rf"weights stay in \.\./{name}/model.*safetensors.*; --weights copy copies", done.stdout)
    return {name: folders / f"{name}.dist" for name in ("llama", "gpt2")}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_is_that_of_transformers(folders: Path, bundles: dict[str, Path], name: str) -> None:
    model = dr.load(bundles[name])
    for prompt in (PROMPT, "caf\u00e9 \u20ac \U0001f600", "the"):
        expected = of_transformers_library(folders / name, prompt, 40)
        assert model.generate(prompt, 40) == expected
        pieces = [*model.stream(prompt, 40)]
        assert "".join(pieces) == expected
        assert all(pieces)
        shown = distir("generate", bundles[name], "--prompt", prompt, "--max-new-tokens", 40)
        assert shown.exit_code == 0, shown.exception
        assert shown.stdout == expected + "\n"
    ids = loaded(folders / name)[1](PROMPT).input_ids
    assert model.generate(ids, 5).tolist() == [*model.stream(ids, 5)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_chats_are_those_of_transformers(folders: Path, bundles: dict[str, Path], name: str) -> None:
    model = dr.load(bundles[name])
    ends = {"eos_token_id": sorted(model.tokenizer.chat_stop)}
    expected = of_transformers_library(folders / name, CHAT, 30, **ends)
    assert model.chat(CHAT, 30) == "".join(model.stream(CHAT, 30)) == expected
    shown = distir("generate", bundles[name], "--chat", "--system", "be brief", "--prompt", PROMPT,
                   "--max-new-tokens", 30)  # fmt: skip
    assert shown.stdout == expected + "\n"
    assert model.chat(PROMPT, 5) == of_transformers_library(folders / name, CHAT[1:], 5, **ends)


def test_stop_tokens_are_those_of_the_model_and_of_a_turn(folders: Path, bundles: dict[str, Path]) -> None:
    model = dr.load(bundles["llama"])
    assert model.tokenizer.stop == {1, END}
    assert model.tokenizer.chat_stop == {1, 3, END}
    assert dr.load(bundles["gpt2"]).tokenizer.stop == {1}
    # A token that is generated somewhere, as the one that ends a text.
    whole = model.generate(loaded(folders / "llama")[1](PROMPT).input_ids, 30).tolist()
    expected = of_transformers_library(folders / "llama", PROMPT, 30, eos_token_id=whole[7])
    assert model.generate(PROMPT, 30, stop=[whole[7]]) == expected
    shown = distir("generate", bundles["llama"], "--prompt", PROMPT, "--stop", whole[7], "--max-new-tokens", 30)
    assert shown.stdout == expected + "\n"
    assert f"{whole.index(whole[7]) + 1} tokens on 2 ranks (threads)" in shown.stderr


def test_stop_texts_end_a_text(bundles: dict[str, Path]) -> None:
    model = dr.load(bundles["llama"])
    whole = model.generate(PROMPT, 40, stop=())
    for stop in (whole[5:8], whole[20:21], whole[:2]):
        expected = whole[: whole.index(stop)]
        assert model.generate(PROMPT, 40, stop=(), stop_text=[stop, "nowhere"]) == expected
        assert model.generate(PROMPT, 40, stop=(), stop_text=stop) == expected
        assert model.generate([PROMPT, "the"], 40, stop=(), stop_text=stop)[0] == expected
    # An iterator that ended early leaves the model to others.
    stream = model.stream(PROMPT, 40)
    next(stream)
    with pytest.raises(RunError, match="in use by a stream of the same thread that is not finished"):
        model.generate(PROMPT, 1)
    stream.close()
    assert model.generate(PROMPT, 40, stop=()) == whole


def test_threads_take_turns(bundles: dict[str, Path]) -> None:
    model = dr.load(bundles["llama"])
    prompts = [PROMPT, "the", "a train"] * 2
    expected = [model.generate(prompt, 9) for prompt in prompts]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda prompt: model.generate(prompt, 9), prompts)] == expected


def test_a_plan_from_a_folder_and_a_module_with_a_tokenizer(folders: Path, tmp_path: Path) -> None:
    expected = of_transformers_library(folders / "llama", PROMPT, 12)
    generation = dr.compile_generation(folders / "llama", precision="float32", strategy="1/3/1/1", max_length=64)
    assert generation.max_length == 64
    assert generation.generate(PROMPT, 12) == expected
    generation.plan.save(tmp_path / "m.dist", backends=("torch",))
    assert dr.load(tmp_path / "m.dist").generate(PROMPT, 12) == expected
    model, tokenizer = loaded(folders / "llama")
    again = dr.compile_generation(model, tokenizer=tokenizer, mesh=1)
    assert again.generate(PROMPT, 12) == expected
    assert {*again.plan.bundle(("torch",)).texts} >= {"tokenizer.json", "chat_template.jinja", "text.json"}


def test_weights_stay_in_their_folder(folders: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    files = read_bundle(bundles["llama"]).manifest.weight_files
    assert {folders / file.path.removeprefix("../") for file in files} == {*(folders / "llama").glob("*.safetensors")}
    # All but constants that the model computes, in float32 for bfloat16.
    own = (bundles["llama"] / "weights.safetensors").stat().st_size
    assert own < sum(file.size for file in files) / 20
    done = distir("compile", folders / "llama", "--generate", "--strategy", "1/3/1/1", "--weights", "copy",
                  "-o", tmp_path / "m.dist", "--backend", "torch")  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert "weights stay" not in done.stdout
    assert read_bundle(tmp_path / "m.dist").manifest.weight_files == ()
    assert dr.load(tmp_path / "m.dist").generate(PROMPT, 9) == dr.load(bundles["llama"]).generate(PROMPT, 9)
    moved = shutil.copytree(bundles["llama"], tmp_path / "moved.dist")
    refused = distir("generate", moved, "--prompt", PROMPT)
    assert isinstance(refused.exception, BundleError)
    assert ".safetensors: the weights are missing\n  hint: move the file back, or compile" in str(refused.exception)


@pytest.mark.sweep
@pytest.mark.mpirun
def test_a_launch_prints_the_text(folders: Path, bundles: dict[str, Path]) -> None:
    expected = of_transformers_library(folders / "llama", PROMPT, 20)
    stop = expected[9:11]
    done = mpirun(2, "-m", "distir_relax", "generate", bundles["llama"], "--prompt", PROMPT, "--max-new-tokens", 20,
                  "--stop-text", stop)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected[: expected.index(stop)] + "\n"
    for options, message in (
        (("--prompt", "x " * LENGTH), "expected at most 128 tokens, found a prompt of"),
        (("--prompt", "x", "--stop-text", ""), "expected stop texts of at least one character, found ''"),
    ):
        refused = mpirun(2, "-m", "distir_relax", "generate", bundles["llama"], *options)
        assert refused.returncode == 2
        assert refused.stderr.count("error:") == 1
        assert f"error: {message}" in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected either --prompt or --tokens, found neither"),
        (("--prompt", "a", "--tokens", "3"), "expected either --prompt or --tokens, found both"),
        (("--tokens", "3", "--chat"), "--chat is for text, found --tokens"),
        (("--tokens", "3", "--stop-text", "a"), "stop texts are for prompts of text, found tokens"),
        (("--prompt", "a", "--system", "b"), "--system is for chats"),
        (("--prompt", "a", "--stop-text", ""), "expected stop texts of at least one character, found ''"),
        (("--prompt", "a " * 99), "expected at most 128 tokens, found a prompt of "),
        (("--prompt", "a", "--stop", "x"), "--stop: expected token ids such as 1,306,4658, found 'x'"),
        (("--prompt", ""), "expected a prompt of at least one token, found none"),
    ],
)
def test_prompts_that_are_refused(bundles: dict[str, Path], options: tuple[str, ...], message: str) -> None:
    done = distir("generate", bundles["gpt2"], *options)
    assert isinstance(done.exception, RunError)
    assert message in str(done.exception)
    assert not done.stdout


def test_chats_that_are_refused(bundles: dict[str, Path]) -> None:
    model = dr.load(bundles["llama"])
    for messages in ([], [PROMPT], 7):
        with pytest.raises(RunError, match="expected text, or messages with role and content, found "):
            model.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"chat_template\.jinja: the chat template .* these messages: no such role"):
        model.chat([{"role": "judge", "content": "x"}])
    with pytest.raises(RunError, match="expected messages with the texts role and content"):
        model.generate([{"role": "user"}])
    with pytest.raises(RunError, match="the program does not continue sequences of tokens"):
        dr.load(_other(bundles["llama"].with_name("other.dist"))).generate([1])


def _other(path: Path) -> Path:
    dr.compile(torch.nn.Linear(4, 3), (torch.randn(2, 4),), mesh=1).save(path, backends=("torch",))
    return path


def test_a_folder_without_a_tokenizer_or_a_template(folders: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folders / "gpt2", bare, ignore=shutil.ignore_patterns("token*", "chat*"))
    generation = dr.compile_generation(bare, mesh=1)
    assert generation.generate([3, 4], 3).shape == (3,)
    generation.plan.save(tmp_path / "m.dist", backends=("torch",))
    done = distir("generate", tmp_path / "m.dist", "--prompt", "a")
    assert isinstance(done.exception, RunError)
    assert f"{tmp_path / 'm.dist'}: expected a tokenizer in the bundle, found none" in str(done.exception)
    shutil.copy(folders / "gpt2" / "tokenizer.json", bare)
    found = read_language_model(bare)
    assert {*found.texts} == {"tokenizer.json", "text.json"}
    again = dr.compile_generation(bare, mesh=1)
    with pytest.raises(RunError, match="the model has no chat template"):
        again.chat("a")
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(ImportModelError, match="bare: transformers cannot read the tokenizer: ") as refused:
        dr.compile_generation(bare)
    assert "remove the tokenizer's files" in refused.value.hint


def test_a_bundle_with_a_changed_tokenizer(bundles: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(bundles["llama"], tmp_path / "m.dist")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json: damaged: its checksum is not the manifest's"):
        read_bundle(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json: missing from the bundle"):
        read_bundle(copy)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("none", (), "none: expected a folder with config.json, or a .gguf file, found nothing"),
        ("", (), "expected a folder with config.json, or a .gguf file, found a folder without it"),
        ("gpt2/config.json", (), "config.json: expected a folder with config.json, or a .gguf file, found a file"),
        ("none.gguf", (), "none.gguf: there is no such file"),
        ("model.py:build", (), "--generate is for a folder of a model, or a GGUF file"),
        ("model.onnx", (), "--generate is for a folder of a model, or a GGUF file"),
        ("gpt2", ("--batch", "2"), "--batch cannot be applied with --generate"),
        ("gpt2", ("--train",), "--train cannot be applied with --generate"),
    ],
)
def test_targets_that_are_refused(
    folders: Path, tmp_path: Path, target: str, options: tuple[str, ...], message: str
) -> None:
    done = distir("compile", folders / target, "--generate", "-o", tmp_path / "m.dist", *options)
    assert isinstance(done.exception, ImportModelError)
    assert message in str(done.exception)
    assert not (tmp_path / "m.dist").exists()


def test_options_without_generate(folders: Path, tmp_path: Path) -> None:
    (folders / "no.gguf").write_bytes(b"GGUF")
    for target, options, message in (
        ("gpt2", ("--weights", "copy"), "--weights is only for language models\n  hint: give --generate"),
        ("gpt2", ("--max-length", "5"), "--max-length is only for language models\n  hint: give --generate"),
        ("no.gguf", (), "a GGUF file is compiled to generate text\n  hint: give --generate"),
        ("no.gguf", ("--generate",), "no.gguf: transformers cannot read the model: "),
    ):
        done = distir("compile", folders / target, "-o", tmp_path / "m.dist", *options)
        assert isinstance(done.exception, ImportModelError), done.exception
        assert message in str(done.exception)


def test_models_that_do_not_generate(folders: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2}
    t5 = transformers.T5Config(num_layers=1, d_model=16, d_ff=20, d_kv=8, num_heads=2, vocab_size=61)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=1))
    bert.save_pretrained(tmp_path / "bert")
    unknown = shutil.copytree(folders / "gpt2", tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    for name, message in (
        ("t5", "expected a token that the decoder begins with, found none"),
        ("bert", r"makes positions along sequence depend on later ones"),
        ("unknown", "unknown: transformers cannot read the model: .*no-such-model"),
    ):
        with pytest.raises(DistIRError, match=message):
            dr.compile_generation(tmp_path / name)


@pytest.fixture(scope="module")
def settings(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `llama` with a generation config that draws."""
    folder = shutil.copytree(folders / "llama", tmp_path_factory.mktemp("settings") / "drawing")
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=9, top_p=0.8, max_new_tokens=5, eos_token_id=[1, END],
        repetition_penalty=1.2, min_p=0.05, no_repeat_ngram_size=4, typical_p=0.9,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def test_settings_of_the_generation_config_are_defaults(settings: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"generation_config\.json, typical_p = 0\.9 is not implemented"):
        generation = dr.compile_generation(settings, mesh=1)
    generation.plan.save(tmp_path / "m.dist", backends=("torch",))
    model = dr.load(tmp_path / "m.dist")
    given: dict[str, Any] = {
        "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 4,
    }  # fmt: skip
    assert model.tokenizer.defaults == {**given, "max_new_tokens": 5}
    assert model.generate(PROMPT, seed=3) == model.generate(PROMPT, 5, seed=3, **given)
    assert model.generate(PROMPT, 9, seed=3, temperature=0) == model.generate(PROMPT, 9, temperature=0)
    # Tokens are for callers who choose all by themselves.
    ids = model.tokenizer.encode(PROMPT)
    assert model.generate(ids, 9).tolist() == model.generate(ids, 9, temperature=0).tolist()
    done = distir("generate", tmp_path / "m.dist", "--prompt", PROMPT, "--seed", 3)
    assert done.stdout.strip() == model.generate(PROMPT, seed=3).strip()
    with model.engine() as engine:
        request = engine.submit(PROMPT)
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty, request.count) == (0.7, 9, 1.2, 5)
        assert len(request.result()) <= 5
        assert engine.submit(ids).sampling.temperature == 0


def test_a_model_that_does_not_draw_has_its_penalty(folders: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folders / "llama", tmp_path / "penalty")
    transformers.GenerationConfig(repetition_penalty=1.3, eos_token_id=[1, END]).save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = dr.compile_generation(folder, mesh=1, precision="float32")
    assert model.tokenizer.defaults == {"repetition_penalty": 1.3}
    expected = of_transformers_library(folders / "llama", PROMPT, 30, repetition_penalty=1.3)
    assert model.generate(PROMPT, 30) == expected != model.generate(PROMPT, 30, repetition_penalty=1.0)


def test_options_of_the_command_are_those_of_generate(folders: Path, bundles: dict[str, Path]) -> None:
    expected = of_transformers_library(folders / "llama", PROMPT, 20, repetition_penalty=1.3)
    options = ("--max-new-tokens", 20, "--repetition-penalty", 1.3)
    assert distir("generate", bundles["llama"], "--prompt", PROMPT, *options).stdout == expected + "\n"
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 4, "min_p": 0.9, "repetition_penalty": 1.3}
    done = CliRunner().invoke(
        app, ["chat", str(bundles["llama"]), *map(str, options), "--temperature=0.8", "--seed=4", "--min-p=0.9"],
        input=PROMPT,
    )  # fmt: skip
    assert dr.load(bundles["llama"]).chat(PROMPT, 20, **drawn) in done.stdout


def test_settings_that_are_damaged(settings: Path, tmp_path: Path) -> None:
    texts = dict(read_language_model(settings).texts)
    for defaults, message in (
        ({"top_k": 1.5}, r"expected a number for 'top_k', found 1\.5"),
        ({"no_repeat_ngram_size": 2.5}, r"expected a number for 'no_repeat_ngram_size', found 2\.5"),
        ({"heat": 1}, "expected one of temperature, top_p, min_p, repetition_penalty, .* for 'heat'"),
        (7, "expected a table, found 7"),
    ):
        table = json.loads(texts["text.json"]) | {"defaults": defaults}
        with pytest.raises(BundleError, match=message):
            Tokenizer.of({**texts, "text.json": json.dumps(table)})


def test_lists_of_texts_and_of_chats(bundles: dict[str, Path]) -> None:
    model = dr.load(bundles["llama"])
    assert model.generate([PROMPT, "the"], 6) == [model.generate(PROMPT, 6), model.generate("the", 6)]
    assert model.generate([CHAT, CHAT[1:]], 6) == [model.generate(CHAT, 6), model.generate(CHAT[1:], 6)]


def test_prompts_of_a_file_and_of_standard_input(bundles: dict[str, Path], tmp_path: Path) -> None:
    model, file = dr.load(bundles["llama"]), tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT, "id": 7}, {"messages": CHAT, "max_new_tokens": 3}, {"prompt": [5, 6]}]
    file.write_text("\n".join([*map(json.dumps, rows), "", json.dumps("a\u2028b")]))
    done = distir("generate", bundles["llama"], "--prompts", file, "--max-new-tokens", 6)
    assert done.exit_code == 0, done.exception
    found = [json.loads(line) for line in done.stdout.split("\n") if line]
    expected = [model.generate(PROMPT, 6), model.generate(CHAT, 3), None, model.generate("a\u2028b", 6)]
    assert [row.get("text") for row in found] == expected
    assert found[0]["id"] == 7
    assert found[2]["tokens"] == model.generate([5, 6], 6).tolist()
    assert {row["ended"] for row in found} <= {"length", "stop"}
    done = CliRunner().invoke(app, ["generate", str(bundles["llama"]), "--prompts", "-"], input='"x"\n')
    assert json.loads(done.stdout)["text"] == model.generate("x")
    done = CliRunner().invoke(
        app, ["generate", str(bundles["llama"]), "--prompt", "-", "--max-new-tokens", "9"], input=PROMPT
    )
    assert done.stdout.removesuffix("\n") == model.generate(PROMPT, 9)
    for line, message in (
        ("{", "prompts.jsonl:2: expected a line of JSON, found '{'"),
        ("[1]", "prompts.jsonl:2: expected a table with either a prompt or messages, found '[1]'"),
        ('{"prompt": [999]}', "prompts.jsonl:2: expected token ids from 0 to 310, found 999"),
    ):
        file.write_text(f"\n{line}\n")
        done = distir("generate", bundles["llama"], "--prompts", file)
        assert message in str(done.exception)
        assert not done.stdout
    done = distir("generate", bundles["llama"], "--prompts", file, "--prompt", "x")
    assert "expected --prompts alone, found --prompt" in str(done.exception)


def test_lines_of_prompts_have_options_of_their_own(bundles: dict[str, Path], tmp_path: Path) -> None:
    model, file = dr.load(bundles["llama"]), tmp_path / "prompts.jsonl"
    text = model.generate(PROMPT, 6)
    rows: list[tuple[dict[str, Any], Any]] = [
        ({"max_tokens": 3}, model.generate(PROMPT, 3)),
        ({"temperature": 1.5, "seed": 3, "top_k": -1}, model.generate(PROMPT, 6, temperature=1.5, seed=3)),
        ({"temperature": 1.5, "seed": 4, "top_p": 0.9}, model.generate(PROMPT, 6, temperature=1.5, seed=4, top_p=0.9)),
        ({"frequency_penalty": 2}, model.generate(PROMPT, 6, frequency_penalty=2)),
        ({"stop": text[2:4]}, model.generate(PROMPT, 6, stop_text=text[2:4])),
        ({"stop_text": [text[3]]}, model.generate(PROMPT, 6, stop_text=text[3])),
        ({"user": "me", "id": 7, "metadata": {"x": 1}, "n": 1, "logprobs": None}, text),
    ]
    file.write_text("\n".join(json.dumps({"prompt": PROMPT, **row}) for row, _ in rows))
    done = distir("generate", bundles["llama"], "--prompts", file, "--max-new-tokens", 6)
    assert done.exit_code == 0, done.exception
    found = [json.loads(line) for line in done.stdout.split("\n") if line]
    assert [row["text"] for row in found] == [expected for _, expected in rows]
    assert len({row["text"] for row in found}) > 4
    for row, message in (
        ({"n": 2}, "prompts.jsonl:1: 'n' is not supported, found 2"),
        ({"logprobs": 3}, "prompts.jsonl:1: 'logprobs' is not supported, found 3"),
        ({"stream": True}, "prompts.jsonl:1: 'stream' is not supported, found True"),
        ({"temprature": 1}, "the field 'temprature' is no option\n  hint: did you mean 'temperature'?"),
        ({"temperature": "hot"}, "prompts.jsonl:1: expected a temperature of at least 0, found 'hot'"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "prompts.jsonl:1: expected a number of new tokens, by one of"),
        ({"max_tokens": "3"}, "prompts.jsonl:1: expected a number of new tokens, by one of"),
        ({"stop": [1.5]}, "prompts.jsonl:1: expected texts or token ids for 'stop', found [1.5]"),
    ):
        file.write_text(json.dumps({"prompt": PROMPT, **row}))
        assert message in str(distir("generate", bundles["llama"], "--prompts", file).exception)


def test_options_of_the_command_for_lines_of_prompts(bundles: dict[str, Path], tmp_path: Path) -> None:
    model, file = dr.load(bundles["llama"]), tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}))
    done = distir(
        "generate",
        bundles["llama"],
        "--prompts",
        file,
        "--max-new-tokens",
        6,
        "--chat",
        "--system",
        "x",
        "--timeout",
        9,
    )
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": PROMPT}]
    assert json.loads(done.stdout)["text"] == model.generate(messages, 6) != model.generate(PROMPT, 6)
    done = distir("generate", bundles["llama"], "--prompts", file, "--backend", "tvm")
    assert "--prompts runs on the torch backend, found --backend tvm" in str(done.exception)
    done = distir("generate", bundles["llama"], "--prompts", file, "--system", "x")
    assert "--system is for chats" in str(done.exception)


def test_a_folder_is_compiled_by_the_commands_that_use_it(
    folders: Path, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def note(path: Path, **_: Any) -> Any:
        made.append(path)
        return read_bundle(path)

    monkeypatch.setattr("distir_relax.bundle.read_bundle", note)
    options = ("--strategy", "1/3/1/1", "--prompt", PROMPT, "--max-new-tokens", 6)
    done = distir("generate", folders / "gpt2", *options)
    assert done.exit_code == 0, done.exception
    assert done.stdout.strip("\n") == dr.load(bundles["gpt2"]).generate(PROMPT, 6).strip("\n")
    assert not any(path.exists() for path in made)
    done = distir("generate", bundles["gpt2"], *options)
    assert "--strategy is for a folder of a model or a GGUF file, found a bundle" in str(done.exception)
    monkeypatch.setattr("distir_relax.runtime.launcher_detection.detect", lambda: "mpi")
    done = distir("generate", folders / "gpt2", *options)
    assert "expected a bundle under a launcher, found the model itself" in str(done.exception)


def test_a_chat_in_the_terminal(bundles: dict[str, Path]) -> None:
    """Two turns, a message that is too long, a new chat, and the end."""
    model = dr.load(bundles["llama"])
    options = ["--max-new-tokens", "9", "--temperature", "0", "--system", "be brief"]
    lines = f"{PROMPT}\n\nthe\n{'x ' * 200}\n/new\n{PROMPT}\n/quit\nnever\n"
    done = CliRunner().invoke(app, ["chat", str(bundles["llama"]), *options], input=lines)
    assert done.exit_code == 0, done.exception
    first = model.chat(CHAT, 9)
    turns = [*CHAT, {"role": "assistant", "content": first}, {"role": "user", "content": "the"}]
    second = model.chat(turns, 9)
    assert [part in done.output for part in (first, second)] == [True, True]
    assert done.stdout.count(first.strip()) >= 2
    assert "expected at most 128 tokens" in done.output
    assert "never" not in done.output
    short = CliRunner().invoke(app, ["chat", str(bundles["llama"]), "--max-new-tokens", "1"], input=PROMPT)
    assert short.stdout.endswith("\n[cut after 1 token]\n")
