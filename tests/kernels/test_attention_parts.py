"""Attention to parts of the keys, joined, is attention to all of them; so are its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from distir_relax.kernels import attention
from distir_relax.kernels.attention import attend_with_normalizers, within_bounds
from distir_relax.kernels.attention_parts import NO_KEYS, attend_part, attention_part_grads

ROWS, KEYS = 13, 29
PARTS = {"even": (10, 10, 9), "uneven": (17, 0, 12), "one by one": (1,) * KEYS}
BOUNDS = torch.stack([torch.arange(ROWS) * 2, torch.arange(ROWS) * 2 + torch.arange(ROWS) % 4], 1)
"""Windows of 0 to 3 keys: some rows have none."""
MASKS: dict[str, torch.Tensor | None] = {
    "none": None,
    "causal": torch.stack([torch.zeros(ROWS, dtype=torch.int64), torch.arange(1, ROWS + 1)], 1),
    "windows": BOUNDS,
    "one for all rows": torch.tensor([[3, 21]]),
    "of each sample": torch.stack([BOUNDS, (BOUNDS + 5).clamp(max=KEYS)]),
    "boolean": torch.rand(2, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(1)) > 0.5,
    "added": torch.randn(4, ROWS, KEYS, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
}


def drawn(width: int, values: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, ROWS, width), (2, 4, KEYS, width), (2, 4, KEYS, values), (2, 4, ROWS, values)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def as_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return within_bounds(mask, KEYS) if mask is not None and mask.dtype == torch.int64 else mask


def part_of(mask: torch.Tensor | None, start: int, size: int) -> torch.Tensor | None:
    if mask is None:
        return None
    return mask - start if mask.dtype == torch.int64 else mask[..., start : start + size]


def joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole result, and the logarithms of all normalizers."""
    normalizers = torch.stack([normalizer for _, normalizer in parts])
    shares = normalizers.softmax(0)
    return sum(share * y for share, (y, _) in zip(shares, parts, strict=True)), normalizers.logsumexp(0)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize(("width", "values", "most"), [(6, 6, 1 << 22), (6, 3, 1 << 22), (6, 6, 500)])
def test_parts_are_joined(
    kind: str, sizes: str, width: int, values: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's kernel, by products where the widths differ, and in blocks of rows."""
    monkeypatch.setattr(attention, "MOST_SCORES", most)
    q, k, v, grad = drawn(width, values)
    mask, starts = MASKS[kind], [sum(PARTS[sizes][:i]) for i in range(len(PARTS[sizes]))]
    places = list(zip(starts, PARTS[sizes], strict=True))
    y, normalizers = joined([
        attend_part(q, k[:, :, a : a + n], v[:, :, a : a + n], part_of(mask, a, n), 0.4) for a, n in places
    ])  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = scaled_dot_product_attention(*leaves, attn_mask=as_mask(mask), scale=0.4)
    allowed = as_mask(mask)
    if allowed is not None and allowed.dtype == torch.bool:
        # As attention is here: a row without keys is zero.
        whole = torch.where(allowed.any(-1, keepdim=True), whole, 0.0)
    torch.testing.assert_close(y, whole, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(whole, leaves, grad)
    means = (y * grad).sum(-1, keepdim=True)
    grads = [
        attention_part_grads(
            q, k[:, :, a : a + n], v[:, :, a : a + n], grad, normalizers, means, part_of(mask, a, n), 0.4
        )
        for a, n in places
    ]
    of_q, of_k, of_v = zip(*grads, strict=True)
    found = sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)
    torch.testing.assert_close(found, tuple(torch.nan_to_num(x) for x in expected), rtol=1e-11, atol=1e-11)


def test_a_row_without_keys_is_zero() -> None:
    q, k, v, _ = drawn(6, 6)
    y, normalizers = attend_part(q, k, v, BOUNDS, 0.4)
    empty = BOUNDS[:, 0] >= BOUNDS[:, 1]
    assert bool(empty.any())
    assert bool((y[:, :, empty] == 0).all())
    assert bool((normalizers[:, :, empty] == NO_KEYS).all())
    assert bool((normalizers[:, :, ~empty] > -100).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_floats_have_normalizers_of_32_bits(dtype: torch.dtype) -> None:
    q, k, v, _ = drawn(6, 6, dtype)
    y, normalizers = attend_part(q, k, v, MASKS["causal"], 0.4)
    expected, exact = attend_part(q.double(), k.double(), v.double(), MASKS["causal"], 0.4)
    assert (y.dtype, normalizers.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(normalizers.double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("repeats", [(), (3, 1)])
def test_heads_share_keys(repeats: tuple[int, ...]) -> None:
    q, k, v, _ = drawn(6, 6)
    counts = torch.tensor(repeats or (2, 2))
    expected = attend_part(q, *(x[:, :2].repeat_interleave(counts, 1) for x in (k, v)), BOUNDS, 0.4)
    found = attend_part(q, k[:, :2], v[:, :2], BOUNDS, 0.4, repeats)
    torch.testing.assert_close(found, expected)


def test_excluded_blocks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a causal mask, in blocks of one row, each row meets the keys up to its own."""
    monkeypatch.setattr(attention, "MOST_SCORES", 1)
    q, k, _, _ = drawn(6, 6)
    found = list(attention.row_blocks(q, k, MASKS["causal"]))
    assert [(keys and (keys.start, keys.stop), mask) for _, keys, mask in found] == [
        ((0, n + 1), None) for n in range(ROWS)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all", "causal", "windows", "of each sample"])
def test_parts_by_native_kernels(kind: str, dtype: torch.dtype) -> None:
    """Of 211 rows and 190 keys of half as many heads, in parts of 90 and of 100; some rows have no keys in a part."""
    rows, keys, cut = 211, 190, 90
    row, generator = torch.arange(rows), torch.Generator().manual_seed(0)
    causal, windows = (
        torch.stack([first, end], 1).clamp(0, keys) for first, end in ((row * 0, row + 1), (row - 7, row - 7 + row % 4))
    )
    found = {"all": None, "causal": causal, "windows": windows, "of each sample": torch.stack([causal, windows])}
    bounds = found[kind]
    shapes = (2, 4, rows, 24), (2, 4, keys, 24), (2, 4, keys, 20), (2, 4, rows, 20)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    places = [(0, cut), (cut, keys - cut)]
    masks = [None if bounds is None else bounds - start for start, _ in places]
    parts = [
        attend_with_normalizers(q, k[:, :, a : a + n], v[:, :, a : a + n], mask, 0.3)
        for (a, n), mask in zip(places, masks, strict=True)
    ]
    y, normalizers = joined([part for part in parts if part is not None])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    allowed = None if bounds is None else within_bounds(bounds, keys)
    whole = scaled_dot_product_attention(*leaves, attn_mask=allowed, scale=0.3)
    whole = whole if allowed is None else torch.where(allowed.any(-1, keepdim=True), whole, 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(y.double(), whole, rtol=tolerance, atol=tolerance)
    expected = torch.autograd.grad(whole, leaves, grad.double())
    means = (whole * grad).sum(-1, keepdim=True).float()
    grads = [
        attention_part_grads(q, k[:, :, a : a + n], v[:, :, a : a + n], grad, normalizers, means, mask, 0.3)
        for (a, n), mask in zip(places, masks, strict=True)
    ]
    of_q, of_k, of_v = zip(*grads, strict=True)
    for value, other in zip((sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)), expected, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=10 * tolerance, atol=10 * tolerance)
