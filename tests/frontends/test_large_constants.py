"""Masks of long sequences: computed without copies, or left to the program; their results are torch's."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.frontends.torch import import_torch, large_constants
from distir_relax.frontends.torch.large_constants import compute_pointwise, narrowed
from distir_relax.ir import TensorType
from distir_relax.sharding import find_nonfinite
from distir_relax.sharding.nonfinite import propagate_nonfinite


def llama(device: str = "cpu", batch: int = 3, length: int = 12, **sizes: int) -> tuple[nn.Module, torch.Tensor]:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "vocab_size": 31, "num_hidden_layers": 2, **sizes}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=6, num_key_value_heads=2, use_cache=False, max_position_embeddings=131072
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    return model, torch.arange(batch * length).view(batch, length) % 31


class Windowed(nn.Module):
    """Attention with an additive mask by position, windows, a divisor with zeros, and a view of the mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        positions = torch.arange(length).expand(batch, -1)
        queries, keys = positions[:, None, :, None], positions[:, None, None, :]
        seen = (keys <= queries) & (keys > queries - 4)
        bias = torch.where(seen, 0.0, float("-inf"))
        heads = x.view(batch, length, 2, -1).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, bias)
        counts = seen.view(batch, length, length).to(torch.float32).sum(-1)
        return y.transpose(1, 2).reshape(x.shape) / counts[..., None]


def windowed() -> tuple[nn.Module, torch.Tensor]:
    return Windowed(), torch.randn(4, 12, 8)


def call(made: tuple[nn.Module, torch.Tensor]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return made[0], (made[1],)


def logits_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.logits  # type: ignore[no-any-return]


@pytest.fixture(params=[1 << 27, 120, 64], ids=["without copies", "masks by ops", "positions by ops"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Treat small constants as large ones: of 12 positions, or of more than the limit."""
    monkeypatch.setattr(large_constants, "SMALL_BYTES", 64)
    monkeypatch.setattr(large_constants, "MOST_BYTES", request.param)
    return int(request.param)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("make", "strategy"), [(llama, "1/2/1/1"), (llama, "3/1/1/1"), (windowed, "2/1/1/1"), (windowed, "1/1/1/1")]
)
def test_results_are_those_of_the_model(make: Callable[[], tuple[Any, ...]], strategy: str, most: int) -> None:
    model, x = make()
    expected = model(x)
    result = dr.compile(model, (x,), strategy=strategy, check=True)(x)
    torch.testing.assert_close(logits_of(result), logits_of(expected))


def test_mask_has_one_index_of_samples(most: int) -> None:
    imported = import_torch(*call(llama()))
    constants = [item.value.tensor for item in imported.module.main.inputs if item.role == "constant"]
    assert TensorType((3, 1, 12, 12), "bool") not in constants
    assert (TensorType((1, 1, 12, 12), "bool") in constants) == (most > 144)


def test_a_mask_that_is_left_to_the_program_is_bounds_of_its_rows(most: int) -> None:
    """No device computes it, however long the sequence is."""
    model, x = llama(batch=3 if most > 144 else 1)
    main = dr.compile(model, (x,), strategy="1/2/1/1").modules["global"].main
    values = [*(item.value for item in main.inputs), *(v for op in main.ops for v in op.results)]
    assert not [v for v in values if v.tensor.dtype == "bool" and v.tensor.elements > 12]
    (bounds,) = [v for v in values if v.tensor == TensorType((12, 2), "int64")]
    assert bounds.name in {op.results[0].name for op in main.ops if op.name == "indexed"}


def test_computed_infinities_block_delays(most: int) -> None:
    imported = import_torch(*call(windowed()))
    main = imported.module.main
    found = propagate_nonfinite(imported.module, find_nonfinite(imported.module, imported.tensors))[main.name]
    biases = [op.operands[3].name for op in main.ops if len(op.operands) == 4]
    assert biases
    assert set(biases) <= found.infinite


def test_pointwise_results_of_uniform_operands() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(0, 3, shape, generator=generator)  # noqa: E731
    x, y = draw(1, 5, 1).expand(4, 5, 6).contiguous(), draw(4, 1, 6)
    assert narrowed(x).shape == (1, 5, 1)
    assert narrowed(y) is y
    result = compute_pointwise(torch.ops.aten.le.Tensor, (x, y), {}, x <= y)
    assert torch.equal(result, x <= y)
    signed = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    assert narrowed(signed) is signed


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("batch", "length", "strategy"), [(16, 8192, "8/1/1/1"), (512, 8192, "8/1/1/1"), (1, 131072, "1/2/1/1")]
)
def test_memory_of_long_sequences(batch: int, length: int, strategy: str) -> None:
    """The mask of the first has 8.6 GB as int64."""
    model, x = llama("meta", batch, length, num_hidden_layers=1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    simulation = dr.simulate((model, (x,)), strategy=strategy, profile="dgx-h100:1")
    assert simulation.makespan > 0
    assert (_status("VmHWM") - before) * 1024 < 1.0e9


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])
