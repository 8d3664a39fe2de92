"""Generation of tokens by compiled language models: the tokens of transformers, on any ranks; sampling; bad input."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Manifest, read_bundle
from distir_relax.cli.app import app
from distir_relax.errors import DistIRError, ImportModelError, RunError, UnsupportedOpError
from distir_relax.layout import is_symbolic
from distir_relax.runtime.generation import (
    GREEDY,
    LanguageProgram,
    Sampling,
    TokenHistory,
    generated_tokens,
    next_tokens,
)
from distir_relax.runtime.generation.sampling import _gumbel
from distir_relax.runtime.session import Session
from tests.imported_once import compile_language_model
from tests.runtime.processes import mpirun

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(120),
    pytest.mark.shares("generation"),
]
VOCABULARY, LENGTH = 61, 256


@cache
def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=3, n_embd=24, vocab_size=VOCABULARY, n_positions=LENGTH)
        return transformers.GPT2LMHeadModel(config).eval()
    options = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}  # fmt: skip
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=3, **options)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).eval()


@cache
def compiled(kind: str = "llama", strategy: str = "1/1/1/1", tail: str = "ragged") -> dr.Generation:
    return compile_language_model(model(kind), strategy=strategy, tail=tail, max_batch=4)


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


# It takes tokens that equal the padding's for padding, unless it is told otherwise.
ENDLESS = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 0}


def of_transformers(kind: str, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), **ENDLESS, **options}
    with torch.no_grad():
        found = model(kind).generate(ids, max_new_tokens=count, do_sample=False, **options)
    return found[:, ids.shape[1] :]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "tail"),
    [
        ("llama", "1/1/1/1", "ragged"), ("llama", "1/3/1/1", "ragged"), ("llama", "1/5/1/1", "pad"),
        ("llama", "3/1/1/1", "ragged"), ("gpt2", "1/2/1/1", "pad"), ("gpt2", "2/3/1/1", "pad"),
        ("gpt2", "2/1/2/1", "ragged"), ("mixtral", "1/2/2/1", "ragged"),
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(kind: str, strategy: str, tail: str) -> None:
    generation = compiled(kind, strategy, tail)
    for batch, length, count in ((1, 1, 12), (3, 7, 30)):
        ids = prompts(batch, length)
        assert torch.equal(generation.generate(ids, count), of_transformers(kind, ids, count))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [
        ("llama", "1/3/1/1", {"repetition_penalty": 1.3}), ("gpt2", "1/1/2/1", {"repetition_penalty": 0.7}),
        ("llama", "1/5/1/1", {"no_repeat_ngram_size": 2}), ("gpt2", "2/3/1/1", {"no_repeat_ngram_size": 1}),
        ("mixtral", "1/2/1/1", {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3}),
    ],
)  # fmt: skip
def test_penalties_are_those_of_transformers(kind: str, strategy: str, options: dict[str, Any]) -> None:
    generation = compiled(kind, strategy)
    for batch, length, count in ((1, 1, 12), (3, 7, 30)):
        ids = prompts(batch, length)
        expected = of_transformers(kind, ids, count, **options)
        assert torch.equal(generation.generate(ids, count, **options), expected)
        assert [*generation.stream(ids[0], count, **options)] == expected[0].tolist()
    assert not torch.equal(expected, of_transformers(kind, ids, count))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3}, {"min_p": 0.6}, {"min_p": 1.0, "top_p": 0.9}, {"min_p": 0.5, "top_k": 20},
        {"min_p": 0.7, "top_p": 0.4, "top_k": 30, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    ],
)  # fmt: skip
def test_draws_are_by_the_scores_of_transformers(options: dict[str, Any]) -> None:
    """The draw of a row is the largest of its scores with noise: those of transformers, after the same noise."""
    ids = prompts(3, 7)
    given = {"top_k": 0, **options, "temperature": 0.3}
    with torch.no_grad():
        made = model("llama").generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=True, output_scores=True,
            output_logits=True, return_dict_in_generate=True, **ENDLESS, **given,
        )  # fmt: skip
    history, sampling = TokenHistory(made.sequences, 7), Sampling(**given, seed=11)
    limited = 0
    for step, (logits, scores) in enumerate(zip(made.logits, made.scores, strict=True)):
        noise = torch.stack([_gumbel(VOCABULARY, 11, row, 7 + step) for row in range(3)])
        drawn = next_tokens(logits, 7 + step, sampling, history)
        assert torch.equal(drawn, (scores.double() + noise).argmax(-1))
        limited += int((drawn != (logits.double() / 0.3 + noise).argmax(-1)).sum())
    assert limited


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("frequency", "presence"), [(0.03, 0.0), (0.0, 0.1), (-0.02, 0.05), (0.01, -0.1)])
def test_penalties_of_generated_tokens_are_those_of_openai(frequency: float, presence: float) -> None:
    """Their formula, in numpy: the logits less frequency times the count of a token, and presence if there is any."""
    ids = prompts(1, 9)[0].tolist()
    counts, tokens = np.zeros(VOCABULARY), list(ids)
    for _ in range(30):
        with torch.no_grad():
            logits = model("llama")(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
        tokens.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
        counts[tokens[-1]] += 1
    options = {"frequency_penalty": frequency, "presence_penalty": presence}
    assert compiled(strategy="1/3/1/1").generate(ids, 30, **options).tolist() == tokens[9:]
    assert compiled().generate(ids, 30).tolist() != tokens[9:]


def test_stages_send_no_weight() -> None:
    """The table of embeddings is the classifier's weight too: both stages have it."""
    module = compiled("gpt2", "1/1/2/1").plan.modules["ranked"]
    sent = [op.operands[0] for f in module.functions for op in f.ops if op.name == "start_send"]
    assert sent
    assert all(is_symbolic(value.tensor.shape) for value in sent)


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kind", "strategy", "tail"),
    [("llama", "1/3/1/1", "ragged"), ("gpt2", "1/2/1/1", "pad"), ("mixtral", "1/2/2/1", "ragged")],
)
def test_two_hundred_tokens(kind: str, strategy: str, tail: str) -> None:
    ids = prompts(2, 50)
    assert torch.equal(compiled(kind, strategy, tail).generate(ids, 200), of_transformers(kind, ids, 200))


def test_the_tvm_backend() -> None:
    generation = dr.compile_generation(model("gpt2"))
    assert generation.plan.mesh.size == 1
    ids = prompts(2, 5)
    assert torch.equal(generation.generate(ids, 6, backend="tvm"), of_transformers("gpt2", ids, 6))


def test_draws_are_the_same_on_any_ranks() -> None:
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 7}
    ids = prompts(2, 4)
    first = compiled().generate(ids, 20, **options)
    assert not torch.equal(first, compiled().generate(ids, 20, **{**options, "seed": 8}))
    for strategy in ("1/3/1/1", "1/1/2/1"):
        assert torch.equal(compiled(strategy=strategy).generate(ids, 20, **options), first)


def test_one_sequence_and_its_stream() -> None:
    generation, ids = compiled(), prompts(1, 6)[0]
    expected = generation.generate(ids, 9)
    assert expected.shape == (9,)
    assert [*generation.stream(ids.tolist(), 9)] == expected.tolist()
    assert [*generation.generate(ids, 9, stream=True)] == expected.tolist()
    stream = generation.stream(ids, 9)
    assert next(stream) == expected[0]
    stream.close()
    assert torch.equal(generation.generate(ids.numpy(), 9), expected)


def test_stop_tokens_end_a_sequence_and_all_of_them_a_batch() -> None:
    generation, ids = compiled(), prompts(3, 7)
    free = generation.generate(ids, 30)
    stop = [int(free[0, 3]), int(free[1, 5]), int(free[2, 1])]
    found = generation.generate(ids, 30, stop=stop)
    ends = [next(i for i, token in enumerate(row.tolist()) if token in stop) for row in free]
    assert found.shape == (3, max(ends) + 1)
    for row, expected, end in zip(found, free, ends, strict=True):
        assert torch.equal(row[: end + 1], expected[: end + 1])
        assert (row[end:] == row[end]).all()


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    count = 20_000
    drawn = [int(next_tokens(logits, position, Sampling(2.0, seed=1))) for position in range(count)]
    expected = (logits[0] / 2).softmax(0)
    frequencies = torch.bincount(torch.tensor(drawn), minlength=5) / count
    assert (frequencies - expected).abs().max() < 0.012
    few = {int(next_tokens(logits, position, Sampling(1.0, top_k=2))) for position in range(200)}
    assert few == {0, 4}
    # 0.46, 0.28 and 0.17 are the largest: the second reaches 0.7.
    nucleus = {int(next_tokens(logits, position, Sampling(1.0, top_p=0.7))) for position in range(200)}
    assert nucleus == {0, 4}
    assert {int(next_tokens(logits, p, Sampling(1.0, top_p=1e-9))) for p in range(20)} == {0}


@pytest.mark.parametrize("limit", [{"top_p": 0.9}, {"top_p": 0.05}, {"top_k": 300}, {"top_k": 5000}])
def test_the_most_probable_of_many_tokens(limit: dict[str, Any]) -> None:
    """A draw from all tokens is the draw from those allowed whenever it is one of them: the noise belongs to tokens."""
    logits = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[None] / 400.0
    order = logits[0].argsort(descending=True)
    before = logits[0].double().softmax(0)[order].cumsum(0) - logits[0].double().softmax(0)[order]
    count = int((before < limit["top_p"]).sum()) if "top_p" in limit else min(limit["top_k"], 1000)
    allowed, same = set(order[:count].tolist()), 0
    for position in range(100):
        free = int(next_tokens(logits, position, Sampling(1.0, seed=3)))
        drawn = int(next_tokens(logits, position, Sampling(1.0, seed=3, **limit)))
        assert drawn in allowed
        assert free not in allowed or drawn == free
        same += free == drawn
    assert same > 100 * count / 2000


def test_rows_and_positions_are_drawn_independently() -> None:
    logits = torch.zeros(2, 1000)
    first, second = next_tokens(logits, 3, Sampling(1.0)), next_tokens(logits, 4, Sampling(1.0))
    assert len({*first.tolist(), *second.tolist()}) == 4
    assert torch.equal(next_tokens(logits, 3, Sampling(1.0)), first)


def test_a_saved_bundle_continues_sequences(tmp_path: Path) -> None:
    generation = compiled("llama", "1/3/1/1")
    generation.plan.save(tmp_path / "m.dist", backends=("torch",))
    bundle = read_bundle(tmp_path / "m.dist")
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest
    assert len(bundle.manifest.states) == 4
    ids = prompts(2, 5)
    session = Session(bundle)
    program = LanguageProgram.of(bundle.manifest)
    assert program.max_length == LENGTH
    steps = [*generated_tokens(program.feed(session, GREEDY), ids, 8, ())]
    assert torch.equal(torch.stack(steps, 1), of_transformers("llama", ids, 8))
    with pytest.raises(
        RunError, match="expected to continue the sequence of the last call, past = 12, batch = 2, found"
    ):
        session({"input_ids": ids}, past=5)
    with pytest.raises(RunError, match=r"past = 12, batch = 2, found past = 12, batch = 1"):
        session({"input_ids": ids[:1]}, past=12)
    assert session({"input_ids": ids[:1]})["logits"].shape == (1, 1, VOCABULARY)


PROMPT = (3, 7, 9)
GENERATE = ("--tokens", "3,7,9", "--max-new-tokens", "6")


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.parametrize(
    ("kind", "strategy", "ranks", "options"),
    [
        ("llama", "1/3/1/1", 3, ()),
        ("gpt2", "1/1/2/1", 2, ()),
        ("llama", "1/2/1/1", 2, ("--temperature=1", "--seed=3", "--repetition-penalty=2", "--min-p=0.7")),
    ],
)
def test_a_launch_prints_the_tokens(
    kind: str, strategy: str, ranks: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    generation = compiled(kind, strategy)
    generation.plan.save(tmp_path / "m.dist", backends=("torch",))
    done = mpirun(ranks, "-m", "distir_relax", "generate", tmp_path / "m.dist", *GENERATE, *options)
    assert done.returncode == 0, done.stderr
    draw = {"temperature": 1.0, "seed": 3, "repetition_penalty": 2.0, "min_p": 0.7}
    expected = generation.generate(PROMPT, 6, **(draw if options else {}))
    assert done.stdout.split() == [str(token) for token in expected.tolist()]
    assert f"6 tokens on {ranks} ranks (mpi), torch: " in done.stderr


@pytest.mark.mpirun
def test_a_launch_refuses_bad_input_once(tmp_path: Path) -> None:
    compiled("llama", "1/2/1/1").plan.save(tmp_path / "m.dist", backends=("torch",))
    for options, message in (
        (("--tokens", "3,x"), "error: --tokens: expected token ids such as 1,306,4658, found '3,x'"),
        (
            ("--tokens", "3", "--max-new-tokens", "300"),
            "error: expected at most 256 tokens, found a prompt of 1 and 300",
        ),
    ):
        done = mpirun(2, "-m", "distir_relax", "generate", tmp_path / "m.dist", *options)
        assert done.returncode == 2
        assert done.stderr.count("error:") == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not done.stdout.strip()


def test_the_command_in_one_process(tmp_path: Path) -> None:
    compiled("llama", "1/3/1/1").plan.save(tmp_path / "m.dist", backends=("torch",))
    free = compiled().generate(PROMPT, 6).tolist()
    runner = CliRunner()
    shown = runner.invoke(app, ["generate", str(tmp_path / "m.dist"), *GENERATE, "--stop", str(free[3])])
    assert shown.exit_code == 0
    assert shown.stdout.split() == [str(token) for token in free[: free.index(free[3]) + 1]]
    other = dr.compile(nn.Linear(4, 3), (torch.randn(2, 4),), mesh=1)
    other.save(tmp_path / "other.dist", backends=("torch",))
    refused = runner.invoke(app, ["generate", str(tmp_path / "other.dist"), *GENERATE])
    assert isinstance(refused.exception, RunError)
    assert "the program does not continue sequences of tokens" in str(refused.exception)


def test_a_plan_of_it_begins_a_sequence() -> None:
    ids = prompts(2, 9)
    with torch.no_grad():
        expected = model("llama")(ids, use_cache=False).logits
    torch.testing.assert_close(
        compiled(strategy="1/3/1/1").plan(ids, use_cache=False).logits, expected[:, -1:], rtol=1e-5, atol=1e-5
    )


def test_prompts_of_several_lengths_are_a_list() -> None:
    generation = compiled()
    found = generation.generate([[3, 4, 5], [7]], 4)
    assert [each.tolist() for each in found] == [generation.generate(p, 4).tolist() for p in ([3, 4, 5], [7])]
    with pytest.raises(DistIRError, match="expected prompts of one length, found 1, 3"):
        next(generation.stream([[3, 4, 5], [7]], 4))


def test_draws_differ_without_a_seed() -> None:
    generation = compiled()
    drawn = {tuple(generation.generate([3, 4], 12, temperature=2.0).tolist()) for _ in range(4)}
    assert len(drawn) > 1
    assert len({tuple(generation.generate([3, 4], 12, temperature=2.0, seed=5).tolist()) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "expected a prompt of at least one token, found none"),
        ([[1, 2], [VOCABULARY]], {}, "expected token ids from 0 to 60, found 61"),
        (
            [1],
            {"temprature": 1},
            r"expected options of sampling \(temperature, top_k, top_p, seed, min_p, .*\), found 'temprature'",
        ),
        ([0.5, 1.0], {}, "expected token ids of one sequence or a batch, found torch.float32 of shape"),
        ("hello", {}, "llamaforcausallm: expected a tokenizer in the bundle, found none"),
        (["hello"], {}, "llamaforcausallm: expected a tokenizer in the bundle, found none"),
        (["hello", 3], {}, r"expected text, messages or token ids, found \['hello', 3\]"),
        ([1], {"stop_text": ["x"]}, "stop texts are for prompts of text, found tokens"),
        ([1, VOCABULARY], {}, "expected token ids from 0 to 60, found 61"),
        ([1] * 250, {"max_new_tokens": 7}, "expected at most 256 tokens, found a prompt of 250 and 7 new ones"),
        ([[1]] * 5, {}, "expected batch of at least 1 and at most 4, found 5"),
        ([1], {"temperature": -1.0}, "expected a temperature of at least 0, found -1.0"),
        ([1], {"top_p": 0.0}, "expected top_p above 0 and at most 1, found 0.0"),
        ([1], {"top_k": -1}, "expected top_k of at least 0, found -1"),
        ([1], {"top_k": 1.5}, "expected top_k of at least 0, found 1.5"),
        ([1], {"temperature": "hot"}, "expected a temperature of at least 0, found 'hot'"),
        ([1], {"seed": "a"}, "expected a whole number as seed, found 'a'"),
        ([1], {"min_p": 1.5}, "expected min_p from 0 to 1, found 1.5"),
        ([1], {"repetition_penalty": 0}, "expected a repetition_penalty above 0, found 0"),
        ([1], {"frequency_penalty": 3}, "expected a frequency_penalty from -2 to 2, found 3"),
        ([1], {"presence_penalty": "x"}, "expected a presence_penalty from -2 to 2, found 'x'"),
        ([1], {"no_repeat_ngram_size": 0.5}, "expected no_repeat_ngram_size of at least 0, found 0.5"),
        ([1], {"max_new_tokens": -2}, "expected a number of new tokens of at least 0, found -2"),
        ([1], {"max_new_tokens": 2.5}, "expected a number of new tokens of at least 0, found 2.5"),
        ([1], {"stop": {VOCABULARY}}, "expected token ids to stop at from 0 to 60, found 61"),
        ([1], {"stop": "end"}, "expected token ids to stop at, such as .2, 7., found 'end'"),
        ([1], {"stop": 3}, "expected token ids to stop at, such as .2, 7., found 3"),
        ([1], {"stop_text": 3}, "expected stop texts, found 3"),
        ([1], {"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_bad_input_is_one_message(prompt: Any, options: dict[str, Any], message: str) -> None:
    generation = compiled()
    with pytest.raises(DistIRError, match=message):
        generation.generate(prompt, **options)
    # The next call is not affected.
    assert torch.equal(generation.generate([3, 4], 2), of_transformers("llama", torch.tensor([[3, 4]]), 2)[0])


class Wrapper(nn.Module):
    """A model whose forward takes anything, with the attributes of another, as those of peft."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def config(self) -> Any:
        return self.base.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


class NamedWrapper(Wrapper):
    """The same with named ids."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.base(input_ids, **kwargs)


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", [Wrapper, NamedWrapper])
def test_models_that_wrap_others(kind: type[Wrapper]) -> None:
    generation = dr.compile_generation(kind(model("llama")).eval(), strategy="1/3/1/1")
    ids = prompts(2, 5)
    assert torch.equal(generation.generate(ids, 9), of_transformers("llama", ids, 9))


class TwoOutputs(nn.Module):
    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": tokens.float(), "b": tokens.double()}


def test_models_that_cannot_generate() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedOpError, match=r"modeling_bert\.py:\d+: nn\.scaled_dot_product_attention makes pos"):
        dr.compile_generation(transformers.BertForMaskedLM(config).eval())
    with pytest.raises(
        ImportModelError, match=r"expected an output of logits, .* found a f32\[batch, sequence\], b f64"
    ):
        dr.compile_generation(TwoOutputs())
    with pytest.raises(ImportModelError, match=f"takes at most {LENGTH} positions, found max_length {LENGTH + 1}"):
        dr.compile_generation(model("gpt2"), max_length=LENGTH + 1)
    for option, least in (("max_length", 2), ("max_batch", 1)):
        with pytest.raises(ImportModelError, match=f"expected {option} of at least {least}, found 0"):
            dr.compile_generation(model("gpt2"), **{option: 0})
    with pytest.raises(DistIRError, match="expected a strategy of one microbatch for text generation, found 1/3/1/2"):
        dr.compile_generation(model("gpt2"), strategy="1/3/1/2")
    with pytest.raises(ImportModelError, match="expected a torch module, or the path of a model, found dict"):
        dr.compile_generation({})  # type: ignore[arg-type]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("limit", [2, 3, 8])
def test_lengths_below_that_of_the_example(limit: int) -> None:
    ids = torch.full((1, 1), 7)
    expected = model("llama").generate(ids, max_new_tokens=limit - 1, do_sample=False, eos_token_id=None)
    generation = dr.compile_generation(model("llama"), max_length=limit, max_batch=1)
    assert torch.equal(generation.generate(ids, limit - 1), expected[:, 1:])
    with pytest.raises(RunError, match=f"expected at most {limit} tokens"):
        generation.generate(ids, limit)
    with pytest.raises(RunError, match=r"found int64 \(2, 1\)"):
        generation.generate([[7], [7]], 1)


def test_length_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ImportModelError, match="expected max_length of at least 2, found 1"):
        dr.compile_generation(model("llama"), max_length=1)


class Positions(nn.Module):
    """A language model without config, with a table of 33 positions."""

    def __init__(self, look_up: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look_up = look_up
        self.tokens, self.places = nn.Embedding(61, 16), nn.Embedding(33, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 61)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.look_up(self.places, ids.shape[1])
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + attended.transpose(1, 2).flatten(2))


def test_table_of_positions_bounds_the_length() -> None:
    table = Positions(lambda places, n: places(torch.arange(n))).eval()
    generation = dr.compile_generation(table)
    assert generation.max_length == 33
    assert len(generation.generate([3, 1, 4], 30)) == 30
    with generation.engine() as engine:
        other = engine.submit([1, 2], 5)
        with pytest.raises(RunError, match="expected at most 33 tokens, found a prompt of 3 and 60 new ones"):
            engine.submit([3, 1, 4], 60)
        engine.run()
        assert len(other.tokens) == 5
    with pytest.raises(ImportModelError, match="the model has 33 positions, found max_length 40"):
        dr.compile_generation(table, max_length=40)


def test_hint_for_a_slice_of_a_table_is_the_option() -> None:
    table = Positions(lambda places, n: places.weight[:n]).eval()
    with pytest.raises(ImportModelError, match=r"hint: the model is limited to this size: give max_length=33$"):
        dr.compile_generation(table)
    assert len(dr.compile_generation(table, max_length=33).generate([3, 1, 4], 30)) == 30


@pytest.mark.sweep
def test_length_of_a_config_has_several_names() -> None:
    mpt = transformers.MptForCausalLM(
        transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=61, max_seq_len=40)
    )
    assert dr.compile_generation(mpt.eval()).max_length == 40
