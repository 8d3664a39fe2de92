"""`distir finetune`: a model that says afterwards what it was taught, whole or by adapters, on one rank and on more."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli.app import app
from distir_relax.errors import DistIRError, RunError
from distir_relax.frontends.pretrained_language_model import tokenizer_files
from distir_relax.integrations.adapters import Adapted, adapt, merge
from distir_relax.integrations.chats import ChatRows, read_chats
from distir_relax.text import Tokenizer
from tests.runtime.processes import mpirun, python
from tests.tokenizers_of_tests import of_bytes, of_transformers

WORDS = ("red", "blue", "green", "white", "black")


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Number {number}?"},
        {"role": "assistant", "content": f"{WORDS[number % 5]} {WORDS[number * 3 % 5]}"},
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in a folder, with a tokenizer and a chat template."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=311, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    of_transformers(of_bytes()).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write(path: Path, chats: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path


def replies(folder: Path, numbers: list[int]) -> list[str]:
    """What the model of a folder answers, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for number in numbers:
        given = tokenizer.apply_chat_template(
            chat(number)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=1, eos_token_id=[1, 3])
        found.append(tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


def test_it_says_afterwards_what_it_was_taught(folder: Path, tmp_path: Path) -> None:
    chats = [chat(number) for number in range(20)]
    data = write(tmp_path / "chats.jsonl", chats)
    lines: list[str] = []
    options = dr.FineTuning(epochs=60, batch=10, lr=6e-3, strategy="2/1/1/1")
    shown: list[str] = []
    samples = dr.callbacks.Samples(
        dr.compile_generation(folder, max_length=64), [chat(7)[:1], chat(8)[:1]], every=60, max_new_tokens=12,
        show=shown.append,
    )  # fmt: skip
    ended = dr.finetune(folder, data, tmp_path / "tuned", options, show=lines.append, callbacks=[samples])
    assert ended.step == 120
    assert [step for step, _ in samples.samples] == [60, 120]
    assert [text.strip() for text in samples.samples[1][1]] == [chat(n)[1]["content"] for n in (7, 8)]
    assert shown[2] == f"step 120: {samples.samples[1][1][0]}"
    assert lines[0].startswith("20 conversations of up to ")
    assert replies(tmp_path / "tuned", list(range(20))) == [messages[1]["content"] for messages in chats]
    generation = dr.compile_generation(tmp_path / "tuned", max_length=64)
    assert generation.generate(chats[7][:1], max_new_tokens=12).strip() == chats[7][1]["content"]


def test_samples_of_other_weights(folder: Path) -> None:
    """A model with other weights generates as transformers does with them; tensors that do not fit are refused."""
    generation = dr.compile_generation(folder, max_length=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = generation.generate([5, 9, 2], 6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    expected = model.generate(
        torch.tensor([[5, 9, 2]]), max_new_tokens=6, do_sample=False, pad_token_id=1, eos_token_id=None
    )
    generation.load_parameters(model.state_dict())
    found = generation.generate([5, 9, 2], 6)
    assert found.tolist() == expected[0, 3:].tolist() != before.tolist()
    name = "model.norm.weight"
    for tensors, message in (
        ({"norm": torch.ones(64)}, "found one for 'norm'"), ({name: torch.ones(3)}, "where it has (64,)"),
    ):  # fmt: skip
        with pytest.raises(DistIRError) as raised:
            generation.load_parameters(tensors)
        assert message in str(raised.value)
    for prompts, every, message in (([], 1, "expected a prompt"), ("Hi", 0, "expected every to be 1 or more steps")):
        with pytest.raises(RunError, match=message):
            dr.callbacks.Samples(generation, prompts, every)


def test_adapters_are_merged_and_runs_resume(folder: Path, tmp_path: Path) -> None:
    """The adapters of a whole run and of one in two parts; all else is the base's."""
    data = write(tmp_path / "chats.jsonl", [chat(number) for number in range(12)])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = dr.FineTuning(epochs=4, batch=5, rank=3, lr=1e-2, strategy="1/2/1/1", evaluation=data)
    dr.finetune(folder, data, whole, options)

    class Stop(dr.Callback):
        def done(self, result: dr.callbacks.StepResult) -> None:
            if result.step == 4:
                self.stop("enough")

    assert dr.finetune(folder, data, parts, options, callbacks=[Stop()]).step == 4
    with pytest.raises(RunError, match="the folder of the result is not empty"):
        dr.finetune(folder, data, parts, options)
    assert dr.finetune(folder, data, parts, options, resume=True).step == 8
    base, found, again = (load_file(path / "model.safetensors") for path in (folder, whole, parts))
    torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-6)
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert changed == {name for name in base if "proj" in name}
    assert all(torch.linalg.matrix_rank(found[n] - base[n], rtol=1e-3) <= 3 for n in changed)


def test_adapters_compute_what_their_merged_layers_do() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
    adapt(model, 2)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"0.down", "0.up", "2.down", "2.up"}
    for module in model.modules():
        if isinstance(module, Adapted):
            torch.nn.init.normal_(module.up)
    x = torch.randn(4, 5)
    expected = model(x)
    merge(model)
    assert [type(module).__name__ for module in model] == ["Linear", "Tanh", "Linear"]
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(DistIRError, match="expected linear layers, found none"):
        adapt(torch.nn.Tanh(), 2)


def test_the_assistant_s_tokens_are_learned() -> None:
    """Of every turn, with the token that ends it; as transformers writes the chat."""
    library = of_transformers(of_bytes())
    tokenizer = Tokenizer.of(tokenizer_files(library, None))
    assert tokenizer is not None
    messages = [*chat(3), *chat(14), {"role": "user", "content": "Bye"}]
    ids, learned = tokenizer.encode_replies(messages)
    assert ids == library.apply_chat_template(messages, return_dict=True)["input_ids"][: len(ids)]
    said = tokenizer.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
    assert said == chat(3)[1]["content"] + chat(14)[1]["content"]
    assert learned[-1]
    assert ids[-1] in tokenizer.chat_stop
    rows = ChatRows([messages, chat(1)], tokenizer, 1024, pad=5)
    assert ChatRows([chat(1)], tokenizer, 64, padded=True).length == 64
    row = rows[1]
    assert rows.length % 8 == 0
    assert row["input_ids"].shape == row["labels"].shape == (rows.length,)
    kept = row["labels"] != -100
    assert torch.equal(row["labels"][kept], row["input_ids"][kept])
    assert row["input_ids"][-1] == 5


def test_packed_conversations_do_not_see_each_other(folder: Path) -> None:
    """The loss of packed rows is that of the conversations one by one; a row has room for several."""
    tokenizer = Tokenizer.of(tokenizer_files(of_transformers(of_bytes()), None))
    assert tokenizer is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    chats = [chat(number) for number in range(11)]

    def loss(rows: ChatRows) -> tuple[float, int]:
        total = torch.zeros(())
        learned = 0
        for number in range(len(rows)):
            row = {name: value[None] for name, value in rows[number].items()}
            count = int((row["labels"][:, 1:] != -100).sum())
            with torch.no_grad():
                total += model(**row).loss * count
            learned += count
        return float(total), learned

    alone, packed = ChatRows(chats, tokenizer, 64), ChatRows(chats, tokenizer, 128, packed=True)
    assert (len(alone), alone.chats, packed.chats) == (11, 11, 11)
    assert len(packed) < 8
    assert loss(packed) == pytest.approx(loss(alone), rel=1e-5)


def test_packing_is_refused_for_other_attention(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention", "full_attention"]}))
    data = write(tmp_path / "chats.jsonl", [chat(1)])
    with pytest.raises(RunError, match="found layers of full_attention, sliding_attention"):
        dr.finetune(folder, data, tmp_path / "out", dr.FineTuning(packed=True))


@pytest.mark.sweep
@pytest.mark.mpirun
@pytest.mark.parametrize("launcher", ["mpirun", "agents"])
def test_ranks_train_what_threads_do(launcher: str, folder: Path, tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    hosts = ("--host", "127.0.0.2:1,127.0.0.3:1", "--rsh", shell)
    start = partial(mpirun, 2) if launcher == "mpirun" else lambda *arguments: python(*arguments, *hosts)
    data = write(tmp_path / "chats.jsonl", [chat(number) for number in range(9)])
    options = dr.FineTuning(epochs=2, batch=4, length=64, lr=1e-3, strategy="2/1/1/1", packed=True)
    dr.finetune(folder, data, tmp_path / "threads", options)
    command = ["-m", "distir_relax", "finetune", folder, "--data", data, "-o", tmp_path / "ranks"]
    flags = ["--epochs", 2, "--batch", 4, "--length", 64, "--lr", 1e-3, "--strategy", "2/1/1/1", "--pack"]
    done = start(*command, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("9 conversations of up to 64 tokens in ") == 1
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "threads"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert {p.name for p in (tmp_path / "ranks").iterdir()} == {p.name for p in (tmp_path / "threads").iterdir()}
    # All ranks have the error; one prints it.
    done = start(*command, *flags)
    assert done.returncode == 2
    assert done.stderr.count("the folder of the result is not empty") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected conversations, found none"),
        ("[1, 2]", "chats.jsonl:1: expected a list of messages"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "chats.jsonl:1: expected a message of the assistant"),
        ("\n{]", "chats.jsonl:2"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(RunError) as raised:
        read_chats(path)
    assert message in str(raised.value)


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "chats.jsonl", [chat(number) for number in range(5)])
    command = ["finetune", str(folder), "--data", str(data), "-o", str(tmp_path / "out"), "--epochs", "1"]
    done = CliRunner().invoke(app, [*command, "--lora", "2", "--batch", "4", "--length", "32"])
    assert done.exit_code == 0, done.output
    assert re.search(r"1 steps, the last with a loss of \d", done.output)
    assert (tmp_path / "out" / "config.json").exists()
    started: list[Any] = []
    monkeypatch.setattr("distir_relax.runtime.launch.launch", lambda *given, **_: started.append(given) or 0)
    assert CliRunner().invoke(app, [*command, "--pack", "-n", "3"]).exit_code == 0
    [(number, arguments)] = started
    assert number == 3
    assert arguments[:6] == [*command[:4], "--output", command[5]]
    assert "--pack" in arguments
    assert "-n" not in arguments
    with pytest.raises(RunError, match="expected the folder of a model"):
        dr.finetune(tmp_path, data, tmp_path / "other")
    with pytest.raises(RunError, match="no conversation has a token of the assistant among its first 8"):
        dr.finetune(folder, data, tmp_path / "other", dr.FineTuning(length=8))


SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_by_hand.py"


def test_rows_by_hand_are_those_of_the_command(folder: Path, tmp_path: Path) -> None:
    definitions, _, _ = SCRIPT.read_text().partition("\nsource, chats")
    scope: dict[str, Any] = {}
    exec(definitions, scope)
    file = write(tmp_path / "chats.jsonl", [chat(1) + chat(2), chat(3)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = Tokenizer.of(tokenizer_files(tokenizer, transformers.AutoModelForCausalLM.from_pretrained(folder)))
    assert texts is not None
    expected = ChatRows(read_chats(file), texts, scope["LENGTH"], padded=True)
    found = scope["rows"](file, tokenizer)
    for number in range(2):
        labels = expected[number]["labels"]
        assert torch.equal(found[number]["labels"], labels)
        assert torch.equal(found[number]["input_ids"][labels >= 0], expected[number]["input_ids"][labels >= 0])


def test_the_script_writes_a_folder(folder: Path, tmp_path: Path) -> None:
    files = [write(tmp_path / name, [chat(number) for number in range(9)]) for name in ("chats.jsonl", "held.jsonl")]
    done = python(SCRIPT, str(folder), *map(str, files), str(tmp_path / "tuned"), "4")
    assert done.returncode == 0, done.stderr
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "tuned"))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    assert replies(tmp_path / "tuned", [1])
