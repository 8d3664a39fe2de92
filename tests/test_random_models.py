"""Random torch models of odd sizes and dtypes give torch's numbers, or an error of ours; ``make fuzz`` runs more."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.models import Model, check, draw, fails, shrink

COUNT, CHUNK = 12, 6


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_a_random_model_gives_what_torch_gives(first: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        model = draw(seed)
        try:
            found[check(model)] += 1
        except Exception as wrong:
            wrong.add_note(f"model {seed}: {shrink(model)}")
            raise
    # What is refused is the exception.
    assert found["right"] >= CHUNK * 2 // 3, found


@pytest.mark.drawn(21)
@pytest.mark.parametrize(
    "line",
    [
        *("v0 // x0.clamp(min=1)", "7 % v0", "v0 & 3", "v0 | v0.flip(0)", "~v0", "v0.clamp(-1.5, 2.5)"),
        *("v0[:0] * 2", "v0[:0].sum(0)", "v0[:1].float().var(0)", "v0.float().var(0, correction=7)"),
        *("v0[:0].any(0)", "v0[:0].all()", "v0[:0].float().logsumexp(0)", "(v0 > 3).max(0)[1]", "v0[:0].chunk(3)[1]"),
        *("v0[0].flip(0)", "v0[0].cumsum(0)", "v0[0].sort()[0]", "v0[0].transpose(0, 0)", "v0[0].prod(0)"),
        *("v0.clone().add_(x0.byte())", "torch.cat([v0.byte(), v0.char()])", "v0.byte().sub(v0.byte(), alpha=-3)"),
        *("v0.scatter_add(0, v0[0] % 7, v0[:1])", "F.linear(v0.float(), v0.float())", "(v0 > 2) ^ v0.sum()"),
        *("v0[0].float().softmax(0)", "v0[0].index_add(0, v0[0] * 0, v0[1])", "v0[0].index_fill(0, v0[0] * 0, 3)"),
        "torch.einsum('...i,...i->...', v0[None], x0[:, None])",
        *("(v0 > 3)[x0 % 7]", "(v0 > 3).index_add(0, v0 % 7, v0 > 5)"),
    ],
)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
def test_what_was_no_error_of_ours_gives_what_torch_gives(line: str, tail: str) -> None:
    lines = ("annotate_sharding(x0, MESH, 'S[0]')", line)
    assert check(Model((torch.arange(1, 8),), {}, lines, 3, tail)) == "right"


def test_a_model_that_is_found_shrinks() -> None:
    """Of a model that fails in its last line, the line stays, and what it needs."""
    lines = ("x0 + 1", "x0 * 2", "v1.sum(0)", "annotate_sharding(v1, MESH, 'S[0]')", "v3.cos_wrong()")
    model = Model((torch.ones(5),), {}, lines, 2, "ragged")
    assert "cos_wrong" in fails(model)
    assert shrink(model).lines == ("x0 * 2", "annotate_sharding(v0, MESH, 'S[0]')", "v1.cos_wrong()")
