"""Sequences split over devices: training and inference equal one process, with every mask, model and other option."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.cost.profile import load_profile
from distir_relax.errors import DistIRError
from distir_relax.ops import Trait, lookup
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies import Strategy, balanced_rows
from distir_relax.strategy_search.search_space import Space
from tests.strategies.test_unequal import unlike
from tests.training.test_attention_training import trained

LENGTH, WORDS = 13, 97
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24,
    "intermediate_size": 50, "vocab_size": WORDS, "initializer_range": 0.3,
}  # fmt: skip
HEADS_OF_4: dict[str, Any] = {**SMALL, "head_dim": 4, "sliding_window": 4}
GPT2: dict[str, Any] = {
    "n_layer": 2, "n_head": 6, "n_embd": 24, "vocab_size": WORDS, "n_positions": 512, "initializer_range": 0.3,
    "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("GPT2", GPT2),
    "rotary, grouped heads": ("Llama", SMALL),
    "windows, soft caps": ("Gemma2", {**HEADS_OF_4, "query_pre_attn_scalar": 4}),
    "sinks, experts": ("GptOss", {**HEADS_OF_4, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "convolutions, scans": (
        "Mamba",
        {"num_hidden_layers": 2, "hidden_size": 24, "vocab_size": WORDS, "state_size": 4, "initializer_range": 0.3},
    ),
}


def language_model(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    name, options = MODELS[kind]
    options = {**options, **more}
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options))
    model.config.use_cache = False
    return model.double().train()  # type: ignore[no-any-return]


def losses(kind: str, **options: Any) -> list[float]:
    """Of three steps, whose labels are the next tokens."""
    ids = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    step = dr.compile_training(language_model(kind), optimizer=dr.optim.SGD(lr=0.3), example_batch=batch, **options)
    return [float(step(batch)) for _ in range(3)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("balanced", [1.05, 1.0], ids=["", "in turns"])
@pytest.mark.parametrize("kind", MODELS)
def test_language_models_learn_as_on_one_device(kind: str, balanced: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of these models are float32, whatever the dtype of the model."""
    monkeypatch.setattr(balanced_rows, "_BALANCED", balanced)
    others = {"learned positions": "2/1/1/1,context=3", "rotary, grouped heads": "1/2/1/1,context=2,sequence_parallel"}
    strategy = others.get(kind, "1/1/1/1,context=3")
    assert losses(kind, strategy=strategy) == pytest.approx(losses(kind), abs=3e-6)


@pytest.mark.parametrize("balanced", [1.05, 1.0], ids=["", "in turns"])
@pytest.mark.parametrize(
    "strategy",
    [
        "1/1/1/1,context=5", "1/2/1/1,context=3", "2/1/1/1,context=2,zero=3",
        "2/1/1/2,context=2,zero=2,checkpoint=block", "1/1/2/2,context=2", "1/1/1/1,context=3,checkpoint=selective",
    ],
)  # fmt: skip
def test_every_mask_with_other_options(strategy: str, balanced: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is plain, causal, in groups, with a mask of each sample, and with a bias that learns: in float64
    losses and parameters are those of torch within 1e-12."""
    monkeypatch.setattr(balanced_rows, "_BALANCED", balanced)
    trained(torch.float64, strategy=strategy)


class Attention(nn.Module):
    """Attention of rows to a memory, by torch's function or by products."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        parts = ((self.q, x), (self.k, memory), (self.v, memory))
        q, k, v = (layer(t).view(2, -1, 3, 4).transpose(1, 2) for layer, t in parts)
        y = (q @ k.mT / 2).softmax(-1) @ v if self.by_hand else F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(2)


class Biased(nn.Module):
    """Causal attention with a bias by the distance of rows and keys, of another slope in each head (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        positions = torch.arange(x.shape[1])
        distance = positions - positions[:, None]
        bias = torch.tensor([0.5, 0.25, 0.125], dtype=x.dtype)[:, None, None] * distance
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(distance > 0, float("-inf")))
        return (self.down(z.transpose(1, 2).flatten(2)) * y).mean()


@pytest.mark.parametrize("devices", [2, 3])
def test_a_bias_by_distance(devices: int) -> None:
    torch.manual_seed(0)
    model = Biased().double()
    own, batch = deepcopy(model), tuple(torch.randn(2, LENGTH, 12, dtype=torch.float64) for _ in range(2))
    optimizer, strategy = dr.optim.SGD(lr=1.0), f"1/1/1/1,context={devices}"
    step = dr.compile_training(model, optimizer=optimizer, example_batch=batch, strategy=strategy)
    loss = own(*batch)
    loss.backward()
    torch.testing.assert_close(step(batch), loss.item(), rtol=1e-12, atol=1e-12)
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - parameter.grad
        torch.testing.assert_close(step.parameters()[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("cut", ["S[1]", "S[1: 5|0|2]"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_split_keys_are_not_gathered(by_hand: bool, cut: str, tail: str) -> None:
    """Ranks exchange the maximum and the sum of each row, and add their parts of the result."""
    torch.manual_seed(0)
    model = Attention(by_hand).double().eval()
    x, memory = (torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 7))
    plan = dr.compile(model, (x, memory), mesh=3, shardings={"memory": cut}, tail=tail)
    torch.testing.assert_close(plan(x, memory), model(x, memory), rtol=1e-12, atol=1e-12)
    ops = Counter(op.name for op in plan.modules["distributed"].main.ops)
    assert (ops["all_reduce"], ops["all_gather"]) == (3, 0)


def test_rows_of_causal_attention_are_split() -> None:
    """Keys and values are gathered, queries are not; heads that divide evenly move instead."""

    class Model(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for heads, expected in ((4, {"all_gather": 2}), (3, {"all_to_all": 3})):
        operands = tuple(torch.randn(2, heads, 7, 4, dtype=torch.float64) for _ in range(3))
        plan = dr.compile(Model(), operands, mesh=3, shardings=dict.fromkeys("qkv", "S[2]"))
        torch.testing.assert_close(plan(*operands), Model()(*operands), rtol=1e-13, atol=1e-13)
        names = (op.name for op in plan.modules["distributed"].main.ops if Trait.COMMUNICATES in lookup(op.name).traits)
        assert Counter(names) == expected


@pytest.mark.parametrize("kind", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_the_dim_of_a_softmax_is_split(kind: str, tail: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(torch, kind)(x, 1)  # type: ignore[no-any-return]

    x = torch.randn(4, 7, dtype=torch.float64) * 300
    for cut in ("S[1]", "S[1: 0|5|2]"):
        plan = dr.compile(Model(), (x,), mesh=3, shardings={"x": cut}, tail=tail)
        torch.testing.assert_close(plan(x), Model()(x), rtol=1e-14, atol=1e-14)
        assert not any(op.name == "all_gather" for op in plan.modules["distributed"].main.ops)


def test_unlike_devices_share_a_sequence_in_proportion() -> None:
    plan = dr.compile(
        Attention(False).double().eval(), (torch.randn(2, 9, 12).double(), torch.randn(2, 9, 12).double()),
        strategy="1/1/1/1,context=2", profile=unlike(2.0, 1.0),
    )  # fmt: skip
    assert "6|3" in plan.text("sharded")


def test_a_sequence_must_be_there() -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.randn(4, 5)
    with pytest.raises(DistIRError, match="the model has no sequence that can be split"):
        dr.compile(model, (x,), strategy="1/1/1/1,context=2")
    ids = torch.randint(0, WORDS, (2, 3))
    with pytest.raises(DistIRError, match="a sequence of 3 positions is too short for 4 devices"):
        dr.compile(
            language_model("rotary, grouped heads").eval(), (ids,), {"use_cache": False}, strategy="1/1/1/1,context=4"
        )
    with pytest.raises(DistIRError, match="context is at least 1, found 0"):
        Strategy.parse("1/1/1/1,context=0")


def test_a_search_fills_its_devices() -> None:
    space = Space(6, [4], trained=True, microbatches=(1,), context=(1, 2, 4))
    strategies = [candidate.strategy for candidate in space.candidates()]
    assert {s.devices for s in strategies} == {6}
    assert {s.context for s in strategies} == {1, 2}
    assert Strategy(3, 1, 1, 1, context=2) in strategies


def test_generation_splits_the_prompt() -> None:
    model = language_model("rotary, grouped heads").eval()
    ids = torch.randint(3, WORDS, (1, 7), generator=torch.Generator().manual_seed(2))
    expected = dr.compile_generation(model, max_length=32).generate(ids, 9)
    found = dr.compile_generation(model, max_length=32, strategy="1/1/1/1,context=2").generate(ids, 9)
    assert torch.equal(found, expected)


def long_training(devices: int, layers: int = 2) -> dr.Plan:
    """Of a Llama in float32, whose three heads of keys serve two heads of queries each."""
    ids = torch.zeros(1, 1009, dtype=torch.int64)
    model = language_model("rotary, grouped heads", num_hidden_layers=layers).float()
    batch = {"input_ids": ids, "labels": ids}
    optimizer = dr.optim.SGD(lr=0.3)
    return dr.compile_training(
        model, optimizer=optimizer, example_batch=batch, strategy=f"1/1/1/1,context={devices}"
    ).plan


def test_keys_are_sent_once_for_all_queries_they_serve() -> None:
    """Gathered before they are repeated, and their gradients added up before they are scattered."""
    functions = long_training(5).modules["distributed"].functions
    sent = Counter(
        (op.name, op.operands[0].placed.local(0).shape[1])
        for function in functions for op in function.ops
        if op.name in ("all_gather", "reduce_scatter") and len(op.operands[0].placed.local(0).shape) > 3
    )  # fmt: skip
    assert {name for name, _ in sent} == {"all_gather", "reduce_scatter"}
    assert {heads for _, heads in sent} == {3}


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_activations_are_divided(devices: int) -> None:
    """At the peak each device has its part, and 5 % more at most: the keys of one of 24 layers. Scratch memory of
    kernels is not among them."""

    def activations(count: int) -> float:
        distributed = long_training(count, 24).modules["distributed"]
        peaks = simulate_module(distributed, load_profile("cpu-local").with_devices(count)).peaks
        return max(peak.split[1] for peak in peaks)

    assert activations(devices) <= activations(1) / devices * 1.05


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_a_million_tokens_on_64_devices(packed: bool) -> None:
    """A Llama of 8 billion parameters without data: the plan is proved, no device has a matrix of rows by keys, also
    where positions restart with each document."""
    config = transformers.LlamaConfig(
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=1 << 20, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = (
            transformers.LlamaForCausalLM(config).to(torch.bfloat16),
            torch.zeros(1, 1_000_000, dtype=torch.int64),
        )
    batch = {"input_ids": ids, "position_ids": ids} if packed else {"input_ids": ids}
    plan = dr.compile(model, (), batch, strategy="1/8/1/1,context=8", check=True)
    distributed = plan.modules["distributed"]
    largest = max(v.placed.local(0).elements for f in distributed.functions for op in f.ops for v in op.results)
    assert largest == 1_000_000 // 8 * 128256 // 8
    assert simulate_module(distributed, load_profile("dgx-h100").with_devices(64)).fits
