"""Generation with the states of a sequence on several devices: tokens of one device, a part of the memory on each."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.compiler.generation import Generation
from distir_relax.cost.profile import load_profile
from distir_relax.ir.symbols import at_sizes
from distir_relax.simulation.simulator import simulate_module
from tests.strategies.test_context import WORDS, language_model
from tests.strategies.test_unequal import unlike

LENGTH = 37
CALLS = ((1, 30), (7, 9), (19, 5), (20, 17), (36, 1))
"""Prompts that are shorter than a block and longer, and numbers of tokens that end in this block and in others."""


def compiled(kind: str, **options: object) -> Generation:
    # The products of experts take float32, and rows of 16 bytes.
    has_experts = kind == "sinks, experts"
    model = language_model(kind, **({"intermediate_size": 48} if has_experts else {})).eval()
    model = model.float() if has_experts else model
    return dr.compile_generation(model, max_length=LENGTH, **options)  # type: ignore[arg-type]


def prompts(batch: int = 2) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(2))


def tokens(generation: Generation) -> list[list[int]]:
    return [generation.generate(prompts()[:, :length], count).tolist() for length, count in CALLS]


@cache
def expected(kind: str) -> list[list[int]]:
    return tokens(compiled(kind))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("learned positions", "1/1/1/1,context=5"),
        ("rotary, grouped heads", "1/1/1/1,context=2"),
        ("rotary, grouped heads", "1/1/1/1,context=3"),
        ("rotary, grouped heads", "1/2/1/1,context=2"),
        ("rotary, grouped heads", "2/1/1/1,context=3"),
        ("rotary, grouped heads", "1/1/2/1,context=2"),
        ("windows, soft caps", "1/1/1/1,context=3"),
        ("sinks, experts", "1/1/1/1,context=2"),
    ],
)
def test_tokens_are_those_of_one_device(kind: str, strategy: str) -> None:
    assert tokens(compiled(kind, strategy=strategy)) == expected(kind)


def test_chunks_across_blocks() -> None:
    """A call appends to several blocks, to a part of one, or to one that is empty so far."""
    one, split = (
        compiled("rotary, grouped heads", strategy=strategy).plan.session("torch")
        for strategy in ("1/1/1/1", "1/1/1/1,context=5")
    )
    for lengths in ((5, 14, 1, 1, 16), (37,), (1, 7, 29), (8, 8, 8, 8, 5)):
        ends = list(accumulate(lengths, initial=0))
        for past, end in pairwise(ends):
            inputs = {"input_ids": prompts()[:, past:end]}
            expected, found = (session(inputs, past=past)["logits"] for session in (one, split))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["1/1/1/1,context=3", "1/2/1/1,context=2"])
def test_the_plan_is_proved_and_saved(strategy: str, tmp_path: Path) -> None:
    generation = compiled("rotary, grouped heads", strategy=strategy, check=True)
    generation.plan.save(tmp_path / "model.dist")
    loaded = dr.load(tmp_path / "model.dist")
    ids = prompts(1)[:, :11]
    assert torch.equal(loaded.generate(ids, 20), generation.generate(ids, 20))


def test_devices_have_the_positions_of_their_blocks() -> None:
    """37 are 13, 12 and 12: a device has those of its block that there are, and appends to them where they are."""
    generation = compiled("rotary, grouped heads", strategy="1/1/1/1,context=3")
    states = generation.plan.session("torch")._states
    seen, moves = [], 0
    before: dict[tuple[int, str], int] = {}
    for _ in generation.stream(prompts(1)[:, :11], 26):
        places = {(rank, name): state.data_ptr() for rank in range(3) for name, state in states.of(rank).items()}
        # One without elements is nowhere.
        moves += sum(before.get(key) not in (None, 0, place) for key, place in places.items())
        before = places
        seen.append([{state.shape[-2] for state in states.of(rank).values()} for rank in range(3)])
    assert seen[0] == [{11}, {0}, {0}]
    assert seen[3] == [{13}, {1}, {0}]
    assert seen[-1] == [{13}, {12}, {11}]
    assert moves == 0


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_the_simulated_memory_is_divided(devices: int) -> None:
    """Of a long text each device has its part of the states, and 5 % more at most. Scratch memory of kernels is not
    among them."""

    def memory(count: int, past: int) -> float:
        distributed = plans[count].modules["distributed"]
        at = at_sizes(distributed, {"batch": 1, "new": 1, "last": 1, "past": past})
        return max(peak.split[1] for peak in simulate_module(at, load_profile("cpu-local").with_devices(count)).peaks)

    model = language_model("rotary, grouped heads", max_position_embeddings=1 << 16).float().eval()
    plans = {
        count: dr.compile_generation(model, max_length=60_000, strategy=f"1/1/1/1,context={count}").plan
        for count in (1, devices)
    }
    assert memory(devices, 59_999) <= memory(1, 59_999) / devices * 1.05


def test_the_tvm_backend() -> None:
    """The last device has no keys of the first tokens, and the first one none of those after its block."""
    generation = compiled("learned positions", strategy="1/1/1/1,context=3")
    ids = prompts(1)[:, :11]
    assert torch.equal(generation.generate(ids, 17, backend="tvm"), generation.generate(ids, 17))


def test_an_encoder_decoder() -> None:
    """The states of cross-attention do not grow, and are whole."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, initializer_factor=3.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    one, split = (
        dr.compile_generation(model, max_length=30, max_source=20, **options)
        for options in ({}, {"strategy": "1/1/1/1,context=2"})
    )
    ids = prompts()[:, :11]
    assert torch.equal(split.generate(ids, 28), one.generate(ids, 28))


class ScoresByHand(nn.Module):
    """A layer of attention whose scores are annotated along the keys."""

    def __init__(self, mesh: dr.DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh, self.embedding = mesh, nn.Embedding(WORDS, 16)
        self.q, self.k, self.v, self.head = (nn.Linear(16, width) for width in (16, 16, 16, WORDS))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, i = self.embedding(input_ids), torch.arange(input_ids.shape[1])
        scores = self.q(x) @ self.k(x).mT
        if self.mesh is not None:
            scores = dr.annotate_sharding(scores, self.mesh, "S[2]")
        weights = scores.masked_fill(i[None, :] > i[:, None], -1e9).softmax(-1)
        return self.head(weights @ self.v(x))  # type: ignore[no-any-return]


def test_states_of_other_cuts_are_whole() -> None:
    """The halves of a text are other positions after each token: they are parts of a state that all devices have."""
    mesh = dr.DeviceMesh((3,), ("x",))
    split = dr.compile_generation(ScoresByHand(mesh).double().eval(), max_length=24, mesh=mesh)
    one = dr.compile_generation(ScoresByHand(None).double().eval(), max_length=24)
    assert torch.equal(split.generate(prompts()[:, :5], 15), one.generate(prompts()[:, :5], 15))
    assert {state.tensor.placement for state in split.plan.bundle().manifest.states} == {"R"}


def test_unlike_devices_share_positions_in_proportion() -> None:
    text = compiled("learned positions", strategy="1/1/1/1,context=2", profile=unlike(2.0, 1.0)).plan.text("sharded")
    assert "S[1: (min(25, past))|(past - min(25, past))]" in text
