"""Generation by encoder-decoders: the tokens of transformers, on any ranks, from saved bundles; bad input."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.errors import BundleError, DistIRError, ImportModelError, RunError
from distir_relax.layout import is_symbolic
from distir_relax.runtime.verification import Verified
from tests.imported_once import compile_language_model
from tests.incremental.language_models import FRAMES, VOCABULARY, encoder_decoder, encoder_input
from tests.runtime.processes import mpirun
from tests.tokenizers_of_tests import of_bytes, of_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(120),
    pytest.mark.shares("encoder-decoders"),
]


@cache
def compiled(name: str, strategy: str) -> dr.Generation:
    return compile_language_model(encoder_decoder(name), strategy=strategy, max_length=64, max_batch=4, max_source=33)


def expected_tokens(
    name: str, source: torch.Tensor, count: int, prompt: tuple[int, ...] = (), **settings: Any
) -> torch.Tensor:
    """The greedy tokens of transformers. Its method for Whisper splits audio; that of its base class generates."""
    model = encoder_decoder(name)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, **settings}
    start = prompt or (model.generation_config.decoder_start_token_id,)
    options["decoder_input_ids"] = torch.tensor([start]).expand(len(source), -1)
    if "whisper" not in name:
        options["attention_mask"] = torch.ones_like(source)
    with torch.no_grad():
        found: torch.Tensor = transformers.GenerationMixin.generate(model, source, **options)
    return found[:, len(start) :]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("t5", "1/5/1/1"), ("t5", "1/1/2/1"), ("bart", "2/1/2/1"), ("whisper", "1/3/1/1")],
)
def test_greedy_tokens_are_those_of_transformers(name: str, strategy: str) -> None:
    generation = compiled(name, strategy)
    for batch, length, count in ((2, 1, 9), (3, 11, 20)):
        source = encoder_input(name, batch, length)
        assert torch.equal(generation.generate(source, count), expected_tokens(name, source, count))


def test_one_sequence_its_stream_and_a_prompt_of_the_decoder() -> None:
    generation, source = compiled("whisper", "1/3/1/1"), encoder_input("whisper", 1, FRAMES)
    expected = expected_tokens("whisper", source, 7)[0]
    assert torch.equal(generation.generate(source[0].numpy(), 7), expected)
    assert [*generation.stream(source[0], 7)] == expected.tolist()
    prompt = (2, 17, 5)
    found = generation.generate(source, 7, decoder_prompt=prompt)
    assert torch.equal(found, expected_tokens("whisper", source, 7, prompt))
    assert not torch.equal(found[0], expected)


def test_penalties_are_for_tokens_of_the_decoder() -> None:
    source, options = encoder_input("t5", 3, 11), {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    found = compiled("t5", "1/5/1/1").generate(source, 20, **options)
    assert torch.equal(found, expected_tokens("t5", source, 20, **options))
    assert not torch.equal(found, expected_tokens("t5", source, 20))


def test_stages_send_no_weight() -> None:
    """Both tables of embeddings and the classifier have one weight, in three stages."""
    plan = compiled("bart", "2/1/2/1").plan
    assert plan.encoder is not None
    for part in (plan, plan.encoder):
        module = part.modules["ranked"]
        sent = [op.operands[0] for f in module.functions for op in f.ops if op.name == "start_send"]
        assert sent
        assert all(is_symbolic(value.tensor.shape) for value in sent)


def test_what_plans_say() -> None:
    plan = compiled("t5", "1/5/1/1").plan
    assert plan.encoder is not None
    assert "inputs   decoder_input_ids: i64[batch, new] R, R, linear" in str(plan)
    assert "inputs   input_ids: i64[batch, source] R, R\n" in str(plan.encoder)
    model = encoder_decoder("t5")
    numbers = [(parameter.ndim, parameter.numel()) for parameter in model.parameters()]
    # All five ranks have the weights of norms; the encoder and the decoder have the table of embeddings.
    copied = sum(4 * size for ndim, size in numbers if ndim == 1) + model.shared.weight.numel()
    assert sum(plan.footprint.weights) == 4 * (sum(size for _, size in numbers) + copied)


def test_a_plan_of_fixed_sizes() -> None:
    plan = compiled("bart", "2/1/2/1").plan.at(batch=2, source=7)
    ids, source = torch.tensor([[2, 9, 4]] * 2), encoder_input("bart", 2, 7)
    with torch.no_grad():
        expected = encoder_decoder("bart")(source, decoder_input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(
        plan(input_ids=source, decoder_input_ids=ids, use_cache=False), expected[:, -1:], rtol=1e-4, atol=1e-4
    )
    with pytest.raises(RunError, match="expected int64"):
        plan(input_ids=source[:, :5], decoder_input_ids=ids, use_cache=False)


def test_a_saved_bundle(tmp_path: Path) -> None:
    path = tmp_path / "m.dist"
    compiled("t5", "1/5/1/1").plan.save(path, backends=("torch",))
    source = encoder_input("t5", 2, 9)
    loaded = dr.load(path)
    assert "inputs   input_ids: int64 (batch, source), decoder_input_ids: int64 (batch, new)" in repr(loaded)
    assert torch.equal(loaded.generate(source, 6), expected_tokens("t5", source, 6))
    ids = torch.zeros(2, 1, dtype=torch.int64)
    assert loaded(input_ids=source, decoder_input_ids=ids, use_cache=False).shape == (2, 1, VOCABULARY)
    weights = path / "encoder" / "weights.safetensors"
    before = Verified.of(read_bundle(path))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert Verified.of(read_bundle(path, verify_weights=False)) != before
    with pytest.raises(BundleError, match="the weights are damaged"):
        read_bundle(path)
    weights.write_bytes(content)
    program = path / "encoder" / "programs" / "main_0.py"
    program.write_text(program.read_text() + "\n")
    with pytest.raises(BundleError, match="damaged: its checksum is not the manifest's"):
        read_bundle(path)
    # Another encoder, whole by itself.
    compiled("bart", "2/1/2/1").plan.save(tmp_path / "other.dist", backends=("torch",))
    for name in ("manifest.json", "distir.txt"):
        (path / "encoder" / name).write_bytes((tmp_path / "other.dist" / "encoder" / name).read_bytes())
    with pytest.raises(BundleError, match="damaged: its checksum is not the manifest's"):
        read_bundle(path)


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_a_launch_and_a_session_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "m.dist"
    compiled("t5", "1/1/2/1").plan.save(path, backends=("torch",))
    source = encoder_input("t5", 1, 5)
    expected = expected_tokens("t5", source, 6)[0].tolist()
    tokens = ",".join(map(str, source[0].tolist()))
    done = mpirun(2, "-m", "distir_relax", "generate", path, "--tokens", tokens, "--max-new-tokens", "6")
    assert done.stdout.split() == [str(token) for token in expected], done.stderr
    with dr.launch(path) as session:
        assert session.generate(source[0], 6).tolist() == expected
        other = encoder_input("t5", 2, 13)
        assert torch.equal(session.generate(other, 4), expected_tokens("t5", other, 4))


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=311, d_model=30, d_kv=6, d_ff=44, num_heads=5, num_layers=1, decoder_start_token_id=0,
        eos_token_id=1, pad_token_id=0, architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "t5")
    of_transformers(of_bytes()).save_pretrained(tmp_path / "t5")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "t5")
    generation = dr.compile_generation(tmp_path / "t5", max_length=64, strategy="1/3/1/1")
    text = "how do I bake bread?"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert generation.generate(text, 12) == tokenizer.decode(tokens[0], skip_special_tokens=True)
    generation.plan.save(tmp_path / "t5.dist", backends=("torch",))
    # The bundle of the encoder refers to the files of the folder, too.
    files = read_bundle(tmp_path / "t5.dist" / "encoder").manifest.weight_files
    assert [file.path for file in files] == ["../../t5/model.safetensors"]
    assert dr.load(tmp_path / "t5.dist").generate(text, 12) == generation.generate(text, 12)


@pytest.mark.parametrize(
    ("name", "prompt", "options", "message"),
    [
        ("bart", [], {}, "expected a prompt of at least one token, found none"),
        ("bart", [[1] * 34], {}, "dim 1 of input 'input_ids': expected source of at least 1 and at most 33, found 34"),
        ("bart", [1], {"max_new_tokens": 64}, "expected at most 64 tokens, found a prompt of 1 and 64 new ones"),
        ("bart", [1], {"decoder_prompt": [61]}, "expected token ids from 0 to 60, found 61"),
        ("bart", [61], {}, "embedding is given the index 61, which is out of range"),
        ("bart", [1], {"decoder_prompt": []}, "expected a prompt of at least one token, found none"),
        ("whisper", "hello", {}, "expected features for the input input_features, float32 .*, found 'hello'"),
        ("whisper", [1, 2], {}, r"found torch.int64 of shape \(2,\)"),
        ("whisper", torch.zeros(7, 20), {}, r"expected float32 \(1, 7, 26\), found float32 \(1, 7, 20\)"),
    ],
)
def test_bad_input_is_one_message(name: str, prompt: Any, options: dict[str, Any], message: str) -> None:
    generation = compiled(name, "2/1/2/1" if name == "bart" else "1/3/1/1")
    with pytest.raises(DistIRError, match=message):
        generation.generate(prompt, **{"max_new_tokens": 5, **options})
    source = encoder_input(name, 2, 5)
    assert torch.equal(generation.generate(source, 2), expected_tokens(name, source, 2))


def test_what_is_refused() -> None:
    generation = compiled("bart", "2/1/2/1")
    with pytest.raises(RunError, match=r"expected a decoder-only model .* found an encoder-decoder"):
        generation.engine()
    with pytest.raises(RunError, match=r"expected a decoder-only model .* found an encoder-decoder"):
        dr.simulate_generation(generation, prompt=3, generate=2, profile="cpu-local")
    config = transformers.GPT2Config(n_layer=1, n_head=3, n_embd=24, vocab_size=VOCABULARY, n_positions=64)
    plain = dr.compile_generation(transformers.GPT2LMHeadModel(config).eval(), strategy="1/1/1/1")
    with pytest.raises(RunError, match="expected no decoder_prompt for a model without encoder"):
        plain.generate([1], 2, decoder_prompt=[1])
    model = encoder_decoder("bart")
    with pytest.raises(ImportModelError, match="the model takes at most 64 positions, found max_length 65"):
        dr.compile_generation(model, max_length=65)


class Pixels(torch.nn.Module):
    """An encoder-decoder of pictures, without a config of transformers."""

    main_input_name = "pixels"

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.PretrainedConfig(is_encoder_decoder=True, decoder_start_token_id=1, vocab_size=17)
        self.encoder = torch.nn.Linear(12, 8)
        self.table = torch.nn.Embedding(17, 8)

    def forward(self, pixels: torch.Tensor, decoder_input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        encoded = self.encoder(pixels.flatten(1)).tanh()[:, None]
        hidden = self.table(decoder_input_ids) + encoded
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True) + hidden
        return {"logits": hidden @ self.table.weight.T}


def test_an_example_of_the_input_of_the_encoder() -> None:
    torch.manual_seed(0)
    model = Pixels()
    with pytest.raises(ImportModelError, match="expected an example of the encoder's input pixels, found none"):
        dr.compile_generation(model)
    generation = dr.compile_generation(model, encoder_example=torch.zeros(2, 3, 4), max_length=32, strategy="1/3/1/1")
    pixels, ids = torch.randn(3, 3, 4), torch.ones(3, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(pixels, ids)["logits"][:, -1:].argmax(2)], 1)
    assert torch.equal(generation.generate(pixels, 6), ids[:, 1:])
