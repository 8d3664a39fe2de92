"""Models with weights of 8 and 4 bits give what the same models give with those weights dequantized, on any ranks."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
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
from distir_relax.kernels.quantized import (
    dequantize,
    linear,
    quantize_int4,
    quantize_int8,
    quantize_int8_groups,
    weights,
)
from distir_relax.runtime.requests import Slot, ThreadRequests

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
QUANTIZE: dict[str, Any] = {
    "int8": quantize_int8_groups, "int8-channel": quantize_int8, "int4": quantize_int4,
}  # fmt: skip
WORDS = 127
SIZES = {"vocab_size": WORDS, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
         "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    # Embeddings that the classifier shares, keys of three heads, and inner sizes of an odd number of groups.
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=160, num_key_value_heads=3, tie_word_embeddings=True)
    ),
    # Weights of (in, out), biases, and a product with a weight of 3 x 96 outputs that is cut by heads.
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=96, n_layer=2, n_head=6)
    ),
    # A classifier of its own.
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, ffn_dim=224, word_embed_proj_dim=96, tie_word_embeddings=False)
    ),
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 126]])


@cache
def model(name: str) -> Any:
    torch.manual_seed(3)
    made = MODELS[name]().eval()
    with torch.no_grad():
        # Outputs of unlike sizes, so that a scale in the wrong place shows.
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(torch.linspace(0.5, 3.0, len(parameter))[:, None])
    return made


@cache
def dequantized(name: str, precision: str) -> torch.Tensor:
    """The logits of the last position, by the model with dequantized weights."""
    copy = deepcopy(model(name))
    done: set[int] = set()
    with torch.no_grad():
        for module in copy.modules():
            weight = getattr(module, "weight", None)
            is_product = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
            if is_product and id(weight) not in done:
                done.add(id(weight))
                is_transposed = type(module).__name__ == "Conv1D"
                matrix = weight.t() if is_transposed else weight
                is_table = module is copy.get_output_embeddings() and copy.config.tie_word_embeddings
                quantize = quantize_int8_groups if precision == "int4" and is_table else QUANTIZE[precision]
                result = dequantize(*quantize(matrix))
                weight.copy_(result.t() if is_transposed else result)
        return copy(IDS, use_cache=False).logits[0, -1:]


def logits(generation: dr.Generation) -> torch.Tensor:
    """The logits of the last position, in two chunks."""
    ranks = ThreadRequests(generation.plan.bundle(("torch",)))
    try:
        ranks.logits([Slot(0, 0, IDS[0, :5].tolist(), 0, 32)])
        return ranks.logits([Slot(0, 5, IDS[0, 5:].tolist(), 1, 32)])
    finally:
        ranks.close()


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with the dequantized weight: inputs are not rounded."""
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy", "tail", "precision"),
    [
        ("llama", "1/1/1/1", "ragged", "int8"), ("llama", "1/2/1/1", "pad", "int4"),
        ("llama", "1/5/1/1", "ragged", "int4"), ("llama", "1/3/1/1", "pad", "int8-channel"),
        ("gpt2", "1/3/1/1", "pad", "int4"), ("gpt2", "1/1/2/1", "ragged", "int8"),
        ("gpt2", "1/5/1/1", "ragged", "int8-channel"), ("opt", "1/2/2/1", "ragged", "int4"),
        ("opt", "1/5/1/1", "pad", "int8"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("exact_inputs")
def test_logits_are_those_of_the_dequantized_model(name: str, strategy: str, tail: str, precision: str) -> None:
    generation = dr.compile_generation(model(name), precision=precision, strategy=strategy, tail=tail)
    expected = dequantized(name, precision)
    torch.testing.assert_close(logits(generation), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("precision", QUANTIZE)
def test_rounded_inputs_change_little(precision: str) -> None:
    """By the native kernels: other logits than with exact inputs, but much closer to them than a float model's."""
    expected = dequantized("llama", precision)
    found = logits(dr.compile_generation(model("llama"), precision=precision, strategy="1/3/1/1"))
    with torch.no_grad():
        error_of_weights = (model("llama")(IDS, use_cache=False).logits[0, -1:] - expected).norm()
    error = (found - expected).norm()
    assert error < 0.03 * expected.norm()
    assert error < (0.5 if precision == "int4" else 2) * error_of_weights


def test_a_folder_is_quantized_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, whose bundle has the tensors of ranks' slices; those kept have all their bits."""
    quantized = []
    check = weights._check_range
    monkeypatch.setattr(weights, "_check_range", lambda weight, levels: quantized.append(check(weight, levels)))
    model("llama").save_pretrained(tmp_path / "folder")
    arguments = ["compile", str(tmp_path / "folder"), "--generate", "--precision", "int4", "--strategy", "1/3/1/1",
                 "--keep", "*.down_proj.weight", "-o", str(tmp_path / "x.dist"), "--backend", "torch"]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    bundle = read_bundle(tmp_path / "x.dist")
    kinds = {w.name: (w.dtype, w.shape) for w in bundle.manifest.weights}
    # Each weight once, though the file has the tensors of narrow dtypes after all others.
    assert len(quantized) == sum(name.endswith(".values") for name in kinds)
    assert kinds["model.layers.1.mlp.down_proj.weight"] == ("float32", (96, 160))
    assert kinds["model.layers.1.mlp.up_proj.weight.values"] == ("uint8", (160, 3, 16))
    assert kinds["model.layers.1.mlp.up_proj.weight.minimums"] == ("float16", (160, 3, 1))
    weight = model("llama").model.layers[1].mlp.up_proj.weight.detach()
    stored = [
        bundle.weights.read(f"model.layers.1.mlp.up_proj.weight.{part}", [[(0, n)] for n in shape])
        for part, shape in (("values", (160, 3, 16)), ("scales", (160, 3, 1)), ("minimums", (160, 3, 1)))
    ]
    for found, expected in zip(stored, quantize_int4(weight), strict=True):
        assert torch.equal(found, expected)
    tokens = dr.load(tmp_path / "x.dist").generate(IDS, max_new_tokens=4)
    assert tokens.shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"precision": "int4", "keep": ["*.up.weight"]}, DistIRError, r"no parameter matches '\*.up.weight' of `keep`"),
        ({"precision": "int8", "keep": ["*"]}, DistIRError, "no weight of the model can be stored as int8"),
        ({"precision": "float32", "keep": ["*"]}, ImportModelError, "`keep` needs a precision that changes weights"),
        ({"precision": "int3"}, ImportModelError, "of float32, bf16, int8, int8-channel, int4, found 'int3'"),
    ],
)
def test_what_cannot_be_quantized_is_said(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        dr.compile_generation(model("llama"), **options)
