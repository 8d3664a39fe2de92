"""Precisions compared with float32: perplexity of language models, errors of outputs of others."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.kernels.quantized import dequantize, linear, quantize_int8_groups
from tests.tokenizers_of_tests import WORDS, of_bytes, of_transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LENGTH = 32
"""Positions of the language model, and so the size of a window."""


class Scores(nn.Module):
    """Outputs of two dtypes, one of them without an error in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 127), nn.Linear(127, 31)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return {"scores": y, "signs": x > 0}


def scores() -> tuple[Scores, torch.Tensor]:
    torch.manual_seed(0)
    return Scores().eval(), torch.randn(5, 96)


def errors_of(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    wrong = found.double() - exact.double()
    return float(wrong.abs().max()), float(wrong.square().mean().sqrt() / exact.double().square().mean().sqrt())


def test_errors_of_outputs_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)
    model, x = scores()
    lines: list[str] = []
    found = dr.compare_precision(model, (x,), precisions=["int8", "bf16"], on_result=lines.append)
    assert [result.precision for result in found.results] == ["float32", "int8", "bf16"]
    rounded, narrow = deepcopy(model), deepcopy(model).bfloat16()
    rounded.up.weight.data = dequantize(*quantize_int8_groups(model.up.weight.detach()))
    with torch.no_grad():
        exact = model(x)["scores"]
        expected = [rounded(x)["scores"], narrow(x.bfloat16())["scores"]]
    for result, scored in zip(found.results[1:], expected, strict=True):
        error = result.errors["scores"]
        assert (error.largest, error.relative_rms) == pytest.approx(errors_of(scored, exact), rel=1e-3)
        assert result.errors["signs"].largest == result.errors["signs"].relative_rms == 0
    weights = 4 * (97 * 127 + 128 * 31)
    assert [r.weight_bytes for r in found.results] == [
        weights,
        weights - 96 * 127 * 4 + 127 * (96 + 3 * 2),
        weights // 2,
    ]
    assert lines == [found.line(result) for result in found.results]
    assert "12 tokens" not in repr(found)
    assert all(line in repr(found) for line in lines)


def test_a_precision_that_a_model_has_not_is_a_result() -> None:
    model, x = scores()
    found = dr.compare_precision(model, (x,), precisions=["bf16", "int4"], keep=["up.*"])
    assert found.results[1].weight_bytes == 4 * 97 * 127 + 2 * 128 * 31
    assert found.results[2].refused == "no weight of the model can be stored as int4"
    assert "refused: no weight" in repr(found)


def test_a_model_that_is_in_bfloat16_itself_is_compared_with_float32() -> None:
    model, x = scores()
    found = dr.compare_precision(model.bfloat16(), (x.bfloat16(),), precisions=["bf16"])
    assert found.results[0].weight_bytes == 2 * found.results[1].weight_bytes
    assert 1e-4 < found.results[1].errors["scores"].relative_rms < 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=311, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=LENGTH, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    of_transformers(of_bytes()).save_pretrained(path)
    (path / "text.txt").write_text(" ".join(WORDS * 2))
    return path


def test_perplexity_is_that_of_transformers(folder: Path) -> None:
    """In windows of as many tokens as the model has positions."""
    found = dr.compare_precision(folder, text=folder / "text.txt", tokens=70, precisions=["bf16"])
    ids = of_bytes().encode((folder / "text.txt").read_text()).ids[:70]
    assert (found.tokens, len(ids)) == (70, 70)

    def expected(dtype: torch.dtype) -> float:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        losses = []
        for start in range(0, 70, LENGTH):
            window = torch.tensor([ids[start : start + LENGTH]])
            with torch.no_grad():
                logits = model(window, use_cache=False).logits[0, :-1].float()
            losses.append(nn.functional.cross_entropy(logits, window[0, 1:], reduction="none"))
        return math.exp(torch.cat(losses).mean())

    wide, narrow = found.results
    assert wide.perplexity == pytest.approx(expected(torch.float32), rel=1e-4)
    assert narrow.perplexity == pytest.approx(expected(torch.bfloat16), rel=0.02)
    assert found.increase(narrow) != 0
    # The 16 frequencies of its positions stay in float32.
    assert wide.weight_bytes - 4 * 16 == 2 * (narrow.weight_bytes - 4 * 16)
    module = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    same = dr.compare_precision(
        module, tokenizer=of_transformers(of_bytes()), text=folder / "text.txt", tokens=70, precisions=[]
    )
    assert same.results[0].perplexity == pytest.approx(wide.perplexity, rel=1e-6)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(app, ["compare-precision", *arguments])
        return json.loads(done.output) if done.exit_code == 0 and "--json" in arguments else done

    file = tmp_path / "scored.py"
    file.write_text("from tests.compiler.test_compare_precision import scores\ndef build(): return scores()\n")
    np.savez(tmp_path / "x.npz", x=np.full((5, 96), 0.3, np.float32))
    own = run(f"{file}:build", "--precision", "bf16", "--json")
    other = run(f"{file}:build", "--precision", "bf16", "--json", "-i", str(tmp_path / "x.npz"))
    assert [result["precision"] for result in own["results"]] == ["float32", "bf16"]
    errors = [found["results"][1]["errors"]["scores"]["largest"] for found in (own, other)]
    assert errors[0] != errors[1]
    assert min(errors) > 0
    shown = run(str(folder), "--precision", "bf16", "--text", str(folder / "text.txt"), "--tokens", "40")
    assert [line.split()[0] for line in shown.output.splitlines()] == ["float32", "bf16"]
    assert "perplexity" in shown.output


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"precisions": ["int3"]}, ImportModelError, "found 'int3'"),
        ({"text": "no.txt"}, DistIRError, "a text is for language models"),
        ({"keep": ["out.*"]}, DistIRError, r"no parameter matches 'out\.\*' of `keep`"),
        ({"inputs": "no.npz"}, DistIRError, "there is no such input file"),
    ],
)
def test_errors(arguments: dict[str, Any], kind: type[DistIRError], text: str) -> None:
    model, x = scores()
    with pytest.raises(kind, match=text):
        dr.compare_precision(model, (x,), **arguments)


def test_errors_of_texts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DistIRError, match=r"there is no such file"):
        dr.compare_precision(folder, text=tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DistIRError, match=r"empty\.txt: expected a text of at least 2 tokens, found 1"):
        dr.compare_precision(folder, text=tmp_path / "empty.txt")
    (tmp_path / "wrong.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DistIRError, match=r"wrong\.txt:1: not UTF-8 text"):
        dr.compare_precision(folder, text=tmp_path / "wrong.txt")
    with pytest.raises(DistIRError, match="needs a text, found inputs"):
        dr.compare_precision(folder, inputs={})
    config = transformers.BertConfig(vocab_size=311, hidden_size=96, num_hidden_layers=1, num_attention_heads=3)
    bert = transformers.BertForMaskedLM(config).eval()
    with pytest.raises(DistIRError, match="causal"):
        dr.compare_precision(bert, tokenizer=of_transformers(of_bytes()))
