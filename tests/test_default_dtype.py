"""Models under another default dtype of torch, which scripts set to make their weights of that one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from tests.test_code_rules import PACKAGE, ROOT, tree_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DTYPES = (torch.bfloat16, torch.float64)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(optimizer: Any, precision: str | None = None) -> list[torch.Tensor]:
    """The losses of a few steps of an MLP of float32, and its parameters after them."""
    generator = torch.Generator().manual_seed(0)
    with default(torch.float32):
        torch.manual_seed(0)
        layers = torch.nn.Linear(40, 72), torch.nn.LayerNorm(72), torch.nn.GELU(), torch.nn.Linear(72, 8)
        model = torch.nn.Sequential(*layers)
    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float32) for n in (40, 8))
    step = dr.compile_training(
        model, F.mse_loss, optimizer=optimizer, example_batch=(x, y), strategy="2/1/1/1", precision=precision
    )
    losses = [step(x, y) for _ in range(3)]
    return [*losses, *step.parameters().values()]


class Decoder(torch.nn.Module):
    """A language model of one block, with weights of float32."""

    def __init__(self) -> None:
        super().__init__()
        with default(torch.float32):
            torch.manual_seed(0)
            self.table, self.head = torch.nn.Embedding(61, 32), torch.nn.Linear(32, 61)
            self.joined, self.norm = torch.nn.Linear(32, 96), torch.nn.RMSNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.table(torch.arange(ids.shape[1])).sin()
        q, k, v = self.joined(self.norm(x)).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        scores: torch.Tensor = self.head(
            x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return scores


def generated(precision: str | None) -> list[torch.Tensor]:
    """The tokens of a model with weights of float32."""
    generation = dr.compile_generation(Decoder(), max_length=32, precision=precision)
    return [generation.generate(torch.arange(10).reshape(2, 5), 12)]


CORE: dict[str, Callable[[], list[torch.Tensor]]] = {
    "AdamW": lambda: trained(dr.optim.AdamW(1e-3)),
    "bf16 training": lambda: trained(dr.optim.AdamW(1e-3), "bf16"),
    "generation": lambda: generated(None),
    "int8": lambda: generated("int8"),
    "int4": lambda: generated("int4"),
}


@cache
def expected(name: str) -> list[torch.Tensor]:
    """The results under float32."""
    with default(torch.float32):
        return CORE[name]()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CORE)
def test_results_are_those_under_float32(name: str, dtype: torch.dtype) -> None:
    with default(dtype):
        found = CORE[name]()
    for a, b in zip(found, expected(name), strict=True):
        torch.testing.assert_close(a, b)


class Makes(torch.nn.Module):
    """Floats to which the model gives no dtype."""

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.zeros(3), torch.full((3,), 0.5), torch.arange(0, 1.5, 0.5), torch.ones(3, 2), torch.eye(3)
        computed = torch.arange(3) / 2, i * 0.5, i.sqrt(), torch.where(i > 1, 0.5, 1.5), torch.tensor(0.5) * i
        return (*made, *computed, x * 0.5, i + x, i / i, torch.linspace(0, 1, 3), torch.scalar_tensor(3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_without_a_dtype_have_the_default_one(dtype: torch.dtype) -> None:
    x, i = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32), torch.tensor([1, 2, 3])
    with default(dtype):
        found = dr.compile(Makes(), (x, i), strategy="1/1/1/1")(x, i)
        for a, b in zip(found, Makes()(x, i), strict=True):
            torch.testing.assert_close(a, b)


CREATION = re.compile(r"torch\.(empty|eye|full|linspace|logspace|ones|rand|randn|zeros)\(")


def test_tensors_of_the_package_do_not_have_the_default_dtype() -> None:
    files = [name for name in PACKAGE if CREATION.search((ROOT / name).read_text(encoding="utf-8"))]
    calls = [(name, node) for name in files for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    missing = [
        f"{name}:{call.lineno}: {ast.unparse(call)}"
        for name, call in calls
        if CREATION.fullmatch(f"{ast.unparse(call.func)}(")
        and not any(keyword.arg in ("dtype", None) for keyword in call.keywords)
    ]
    assert missing == []
