"""Gradients of attention, by the native kernel and by torch, against torch's autograd in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distir_relax.kernels import attention
from distir_relax.kernels.attention_gradients import attention_grads

# One number of threads for all: a kernel takes seconds to compile.
pytestmark = pytest.mark.usefixtures("three_threads")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(
    dtype: torch.dtype, batch: int, heads: int, rows: int, tokens: int, width: int, value_width: int
) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result, all but keys with heads next to rows in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, width), (tokens, width), (tokens, value_width), (rows, value_width)]
    q, k, v, grad = (torch.randn(batch, n, heads, w, generator=generator).to(dtype).transpose(1, 2) for n, w in shapes)
    return [q, k.contiguous(), v, grad]


def agree(tensors: list[torch.Tensor], mask: torch.Tensor | None = None, causal: bool = False) -> None:
    """Fail unless the gradients are those of autograd, relative to the largest, in the order of the operands."""
    q, k, v, grad = tensors
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    added = mask.double() if mask is not None and mask.dtype != torch.bool else torch.zeros(())
    allowed = allowed & mask if mask is not None and mask.dtype == torch.bool else allowed
    scores = 0.3 * wide[0] @ wide[1].mT + added
    y = torch.softmax(scores.where(allowed, -torch.inf), -1) @ wide[2]
    exact = torch.autograd.grad(y, wide, grad.double())
    found = attention_grads(q, k, v, grad, mask, 0.3, causal)
    for x, one, expected in zip((q, k, v), found, exact, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (x.dtype, x.shape, torch.empty_like(x).stride())
        error = (one.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[x.dtype], error


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 5, 37, 127, 7, 19)),
        (torch.float32, (1, 3, 259, 129, 32, 64)),
        (torch.bfloat16, (3, 5, 127, 37, 40, 17)),
        (torch.float64, (3, 5, 37, 127, 7, 19)),
    ],
)
@pytest.mark.parametrize("most", [1 << 13, 1 << 10])
def test_gradients_are_those_of_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some heads at a time, or of some rows of one head."""
    monkeypatch.setattr(attention, "MOST_SCORES", most)
    batch, heads, rows, tokens, *_ = shape
    tensors = drawn(dtype, *shape)
    generator = torch.Generator().manual_seed(1)
    agree(tensors)
    agree(tensors, causal=True)
    for sizes in ((batch, 1), (1, heads), (heads,), ()):
        mask = torch.rand(*sizes, rows, tokens, generator=generator) < 0.7
        mask[..., 0] = True
        agree(tensors, mask)
    agree(tensors, mask, causal=True)
    square = min(rows, tokens)
    agree([x[:, :, :square] for x in tensors], torch.ones(1, 1, square, square, dtype=torch.bool).tril())
    agree(tensors, torch.rand(batch, 1, 1, tokens, generator=generator) < 0.99)
    agree(tensors, torch.randn(heads, rows, tokens, generator=generator).to(dtype))
    # Other layouts: rows apart from each other, and elements of a row apart.
    agree([torch.stack([x, x], -2)[..., 0, :] for x in tensors])
    agree([torch.stack([x, x], -1)[..., 0] for x in tensors])
    # Few rows, which are left to torch.
    agree([x[:, :1, :2] for x in tensors])


def test_rows_without_keys_have_no_gradient() -> None:
    q, k, v, grad = drawn(torch.float32, 3, 5, 37, 127, 7, 19)
    mask = torch.ones(37, 127, dtype=torch.bool)
    mask[5] = False
    of_q, of_k, of_v = attention_grads(q, k, v, grad, mask, 0.3, causal=False)
    assert not of_q[:, :, 5].any()
    rest = [i for i in range(37) if i != 5]
    _, *others = attention_grads(q[:, :, rest], k, v, grad[:, :, rest], None, 0.3, causal=False)
    torch.testing.assert_close([of_k, of_v], others, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_head_and_row() -> None:
    q, k, v, grad = drawn(torch.float32, 3, 5, 37, 127, 7, 19)
    grad[1, 2, 3, 4] = torch.nan
    of_q, of_k, _ = attention_grads(q, k, v, grad, None, 0.3, causal=False)
    assert of_q.isnan().any(-1).nonzero().tolist() == [[1, 2, 3]]
    assert of_k.isnan().flatten(2).any(-1).nonzero().tolist() == [[1, 2]]


def test_empty_tensors_have_empty_gradients() -> None:
    for batch, rows, tokens in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        tensors = drawn(torch.float32, batch, 5, rows, tokens, 7, 19)
        for x, one in zip(tensors, attention_grads(*tensors, None, 0.3, causal=False), strict=False):
            assert one.shape == x.shape
            assert not one.any()


def test_keys_and_values_without_elements() -> None:
    """Without elements of keys all weights are equal; values without elements give no gradient."""
    q, k, v, grad = drawn(torch.float32, 3, 5, 37, 127, 0, 19)
    *_, of_v = attention_grads(q, k, v, grad, None, 0.3, causal=False)
    torch.testing.assert_close(of_v, grad.mean(2, keepdim=True).expand_as(v) * 37 / 127)
    q, k, v, grad = drawn(torch.float32, 3, 5, 37, 127, 7, 0)
    assert not any(x.any() for x in attention_grads(q, k, v, grad, None, 0.3, causal=False))
