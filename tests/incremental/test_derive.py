"""Incremental forms of single ops, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.analysis.causality import check_causality
from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.incremental import Incremental
from distir_relax.ir import CachedState
from distir_relax.ops import TABLE
from tests.incremental.chunks import cuts, derived, in_chunks

LENGTH = 11
DIMS = {"x": {0: "batch", 1: dr.Dim("sequence", max=64)}}


class Uses(torch.nn.Module):
    """Runs a function on its input."""

    def __init__(self, use: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(x)


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    heads = x.unflatten(2, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * 0.5, heads + 1, **options).transpose(1, 2)


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])


def distances(x: torch.Tensor) -> torch.Tensor:
    return (positions(x)[:, None] - positions(x)[None, :]).float()


def windowed(x: torch.Tensor) -> torch.Tensor:
    return (distances(x) >= 0) & (distances(x) < 3)


CAUSAL: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "pointwise": (lambda x: torch.tanh(x) * 2, 0),
    "positions": (lambda x: x + positions(x)[:, None] * 0.1, 0),
    "positions in steps of 3": (lambda x: x + torch.arange(1, 3 * x.shape[1], 3)[:, None], 0),
    "the sequence flattened with the batch": (lambda x: F.silu(x.reshape(-1, 6) @ torch.eye(6)).reshape(x.shape), 0),
    "cumulative sum": (lambda x: x.cumsum(1), 1),
    "cumulative sum of a cumulative sum": (lambda x: (x.cumsum(1) * x).cumsum(1).cumsum(2), 2),
    "cumulative sum of positions": (lambda x: x + positions(x).cumsum(0)[:, None], 0),
    "causal attention": (lambda x: attention(x, is_causal=True), 2),
    "masked attention": (lambda x: attention(x, attn_mask=windowed(x)), 2),
    "biased attention": (
        lambda x: attention(x, attn_mask=torch.where(windowed(x), distances(x) * -0.2, -torch.inf)), 2,
    ),
    "attention by hand": (
        lambda x: (x @ x.transpose(1, 2)).masked_fill(~windowed(x), -torch.inf).softmax(2) @ x, 1,
    ),
    "distances to what was there": (
        lambda x: ((x[:, :, None] - x[:, None]).square() * (distances(x) >= 0)[..., None]).sum(2), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_give_the_whole(name: str) -> None:
    use, states = CAUSAL[name]
    torch.manual_seed(0)
    model = Uses(use)
    imported = import_torch(model, (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    check_causality(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    assert sum(isinstance(record, CachedState) for record in module.records) == states
    x = torch.randn(3, LENGTH, 6)
    expected = model(x)
    for seed in range(10):
        found = in_chunks(module, imported, {"x": x}, cuts(LENGTH, seed))
        torch.testing.assert_close(found["output"], expected, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "flip": (lambda x: x.flip(1), "flip"),
    "softmax": (lambda x: x.softmax(1), "nn.softmax"),
    "shift": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "strided_slice"),
    "sort": (lambda x: x.sort(1).values, "argsort"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_refused_with_its_line(name: str) -> None:
    use, op = REFUSED[name]
    imported = import_torch(Uses(use), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    with pytest.raises(UnsupportedOpError, match=rf"^test_derive\.py:\d+: {op} mixes positions along sequence"):
        Incremental().run(imported.module)


BOTH_WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attention without a mask": (attention, "nn.scaled_dot_product_attention"),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "mean"),
    "the next": (lambda x: attention(x, attn_mask=distances(x) >= -1), "nn.scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_depends_on_later_positions_is_refused(name: str) -> None:
    use, op = BOTH_WAYS[name]
    imported = import_torch(Uses(use), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    message = rf"^test_derive\.py:\d+: {op} makes positions along sequence depend on later ones"
    with pytest.raises(UnsupportedOpError, match=message):
        check_causality(imported.module, imported.tensors, "sequence")


def test_a_program_without_the_size() -> None:
    imported = import_torch(Uses(torch.tanh), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    with pytest.raises(DistIRError, match="the program has no size 'tokens'\n  hint: its sizes are batch, sequence"):
        Incremental("tokens").run(imported.module)
    with pytest.raises(DistIRError, match="no size 'tokens'"):
        check_causality(imported.module, imported.tensors, "tokens")


def test_every_incremental_form_is_run() -> None:
    assert {entry.name for entry in TABLE.entries() if entry.incremental} == {
        "arange", "cumsum", "nn.scaled_dot_product_attention",
    }  # fmt: skip
