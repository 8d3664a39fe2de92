"""State that models keep outside of buffers: attributes that each call replaces, and tensors in plain objects."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.module_state import object_tensors
from distir_relax.runtime import step
from distir_relax.runtime.outputs import collect_output

ROWS, WIDTH = 2, 3


class Smoothed(nn.Module):
    """Keeps its last result in an attribute."""

    def __init__(self, state: torch.Tensor | None, missing: float = 0.0) -> None:
        super().__init__()
        self.state, self.missing, self.layer = state, missing, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.full_like(x, self.missing) if self.state is None else self.state
        self.state = torch.tanh(self.layer(x) + state)
        return self.state * 2


class Growing(Smoothed):
    """Each call makes the attribute longer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x if self.state is None else torch.cat([self.state, x])
        return self.state.sum(0)


@pytest.mark.parametrize("start", [None, torch.ones(ROWS, WIDTH)], ids=["none", "ones"])
def test_an_attribute_replaced_by_its_like_is_state(start: torch.Tensor | None) -> None:
    model = Smoothed(start).eval()
    plan = dr.compile(model, (torch.randn(ROWS, WIDTH),), strategy="1/3/1/1", verify=True)
    assert model.state is start
    assert list(plan.session().state()) == ["state"]
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        torch.testing.assert_close(plan(x), model(x).detach())


@pytest.mark.parametrize("model", [Smoothed(None, missing=1.0), Growing(torch.ones(ROWS, WIDTH))])
def test_other_attributes_are_refused(model: Smoothed) -> None:
    before = model.state
    with pytest.raises(ImportModelError, match="the model replaces its attribute 'state' while it runs"):
        dr.compile(model.eval(), (torch.randn(ROWS, WIDTH),))
    assert model.state is before
    assert not dict(model.named_buffers())


@pytest.mark.sweep
def test_recurrent_gemma_keeps_its_states() -> None:
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=61, attention_window_size=8, lru_width=32,
    )  # fmt: skip
    model, ids = transformers.RecurrentGemmaForCausalLM(config).eval(), torch.randint(0, 61, (2, 7))
    plan = dr.compile(model, (ids,), {"use_cache": False}, strategy="1/3/1/1")
    expected = model(ids, use_cache=False).logits.detach()
    torch.testing.assert_close(plan(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert "model.layers.0.temporal_block.rg_lru.recurrent_states" in plan.session().state()


class Held:
    """A plain object with tensors."""

    def __init__(self) -> None:
        self.rows = [torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH)]
        self.calls = {"count": torch.zeros((), dtype=torch.int64)}


class Writing(nn.Module):
    """Writes to tensors of an object, one of which is a buffer too."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.held, self.layer = Held(), nn.Linear(WIDTH, WIDTH)
        if registered:
            self.register_buffer("row", self.held.rows[0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.calls["count"].add_(1)
        self.held.rows[0][1:].add_(self.layer(x)[1:])
        self.held.rows[1].copy_(self.held.rows[0].sum(0))
        return self.held.rows[0] * self.held.calls["count"] + self.held.rows[1]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/3/1/1"])
def test_tensors_of_objects_are_state(registered: bool, strategy: str) -> None:
    model = Writing(registered).eval()
    plan = dr.compile(model, (torch.randn(ROWS, WIDTH),), strategy=strategy, verify=True)
    # Reading the model has left it as it was.
    assert not any(t.any() for t in (*model.held.rows, *model.held.calls.values()))
    first = "row" if registered else "held.rows.0"
    assert set(plan.session().state()) == {first, "held.rows.1", "held.calls.count"}
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(plan(x), model(x))


def test_python_modules_are_not_searched_for_state() -> None:
    """A model may keep `torch` in an attribute, whose namespace would take longer than the export."""
    library = ModuleType("library")
    model = nn.Identity()
    model.libraries, model.held = {"one": library}, [torch.ones(2)]
    library.table = torch.ones(3)  # type: ignore[attr-defined]
    assert [path for path, _ in object_tensors(model)] == ["held.0"]


def test_state_stays_on_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[str] = []

    def collect(comm: Any, tensor: Any, local: Any) -> Any:
        collected.append(tensor.name)
        return collect_output(comm, tensor, local)

    monkeypatch.setattr(step, "collect_output", collect)
    model = Writing(False).eval()
    plan = dr.compile(model, (torch.randn(ROWS, WIDTH),), strategy="1/3/1/1")
    loaded = dr.load(plan.save(tmp_path / "state.dist", ("torch",)))
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH)
        torch.testing.assert_close(loaded(x), plan(x))
    assert set(collected) == {"output"}


class Decoder(nn.Module):
    """A language model with a static cache, token by token."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        config = model.config
        self.model, self.cache = model, transformers.StaticCache(config=config, max_cache_len=length)
        size = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(ROWS, config.num_key_value_heads, size, torch.float32, torch.device("cpu"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, past_key_values=self.cache, use_cache=True).logits
        return logits


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/2/1/1", "1/1/2/1"])
def test_a_static_cache_decodes_as_the_whole_sequence(strategy: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 61, (ROWS, 7))
    plan = dr.compile(Decoder(model, 16), (ids[:, :1],), strategy=strategy)
    found = torch.cat([plan(ids[:, t : t + 1]) for t in range(7)], 1)
    torch.testing.assert_close(found, model(ids, use_cache=False).logits.detach(), rtol=1e-4, atol=1e-5)
