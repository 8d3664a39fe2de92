"""Attention to a part of the keys: its result, the logarithm of its normalizer, and their gradients.

Results of parts are joined by their normalizers (Dao et al., FlashAttention, 2022). Rows are computed in blocks, each
with the keys between the first and the last that its bounds allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from distir_relax.kernels.attention import attend_with_normalizers, repeat_heads, row_blocks
from distir_relax.kernels.attention_gradients import grads_natively
from distir_relax.kernels.recording import recording

NO_KEYS = -1e30
"""The logarithm of the normalizer of a row without keys; finite, so that differences are numbers."""
_FUSED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    repeats: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the attention to keys, as `attention.attend`, and the logarithm of each row's normalizer, (b, h, s, 1).

    The logarithms are float32, or float64 for that dtype. A row without keys has a result of zero, and `NO_KEYS`.
    """
    if (found := recording()) is not None:
        return found.whole(attend_part, q, k, v, mask, scale, repeats)
    if (natively := attend_with_normalizers(q, k, v, mask, scale, repeats)) is not None:
        return natively
    batch, heads = q.shape[:2]
    k, v = (_repeated(x, heads, repeats) for x in (k, v))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block, keys, allowed in row_blocks(q, k, mask):
        if keys is None:
            shape = batch, heads, block.stop - block.start
            empty = (
                q.new_zeros(*shape, v.shape[3]),
                torch.full((*shape, 1), NO_KEYS, dtype=_wide(q.dtype), device=q.device),
            )
            parts.append(empty)
        else:
            attend = _fused if _is_fused(q, v) else _by_products
            parts.append(attend(q[:, :, block], k[:, :, keys], v[:, :, keys], allowed, scale))
    ys, normalizers = zip(*parts, strict=True)
    return torch.cat(ys, 2), torch.cat(normalizers, 2)


def attention_part_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, normalizers: torch.Tensor,
    means: torch.Tensor, mask: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what a part of the keys adds to the gradient of queries, and the gradients of these keys and values.

    `normalizers` and `means`, (b, h, s, 1), are those of all keys: the logarithms of the normalizers, and the sums of
    the products of `grad` and the result.
    """
    if (found := recording()) is not None:
        return found.whole(attention_part_grads, q, k, v, grad, normalizers, means, mask, scale)
    if (natively := grads_natively(q, k, v, grad, mask, scale, (normalizers, means))) is not None:
        return natively
    blocks = [(block, keys, allowed) for block, keys, allowed in row_blocks(q, k, mask) if keys is not None]
    if len(blocks) == 1 and blocks[0][:2] == (slice(0, q.shape[2]), slice(0, k.shape[2])):
        return _block_grads(q, k, v, grad, normalizers, means, blocks[0][2], scale)
    wide = _wide(q.dtype)
    of_q = torch.zeros_like(q)
    of_k, of_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    for block, keys, allowed in blocks:
        given = grad[:, :, block], normalizers[:, :, block], means[:, :, block]
        of_q[:, :, block], of_keys, of_values = _block_grads(
            q[:, :, block], k[:, :, keys], v[:, :, keys], *given, allowed, scale
        )
        of_k[:, :, keys] += of_keys
        of_v[:, :, keys] += of_values
    return of_q, of_k.to(q.dtype), of_v.to(q.dtype)


def _block_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, normalizers: torch.Tensor,
    means: torch.Tensor, allowed: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `attention_part_grads` of a block of rows and keys."""
    weights = torch.exp(_masked(_scores(q, k, allowed, scale) - normalizers, allowed, -math.inf))
    slopes = (torch.matmul(grad, v.mT).to(weights.dtype) - means) * weights * scale
    slopes, weights = slopes.to(q.dtype), weights.to(q.dtype)
    return torch.matmul(slopes, k), torch.matmul(slopes.mT, q), torch.matmul(weights.mT, grad)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _repeated(x: torch.Tensor, heads: int, repeats: Sequence[int]) -> torch.Tensor:
    if repeats:
        return repeat_heads(x, repeats)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _is_fused(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether torch has a kernel that gives normalizers, too."""
    return type(q) is torch.Tensor and q.is_cpu and q.dtype in _FUSED and q.shape[3] == v.shape[3] > 0


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, tokens = q.shape[2], k.shape[2]
    empty, added = None, allowed
    if allowed is not None and allowed.dtype == torch.bool:
        empty = ~allowed.any(-1, keepdim=True)
        added = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, -math.inf)
    if added is not None:
        added = added.reshape((1,) * (4 - added.dim()) + added.shape).expand(-1, -1, rows, tokens)
    operands = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    y, normalizers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, False, attn_mask=added, scale=scale
    )
    normalizers = normalizers.unsqueeze(-1)
    # The kernel gives zeros for rows without keys.
    return y, normalizers if empty is None else normalizers.masked_fill(empty, NO_KEYS)


def _by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _masked(_scores(q, k, allowed, scale), allowed, NO_KEYS)
    normalizers = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(_masked(scores - normalizers, allowed, -math.inf))
    if allowed is not None and allowed.dtype == torch.bool:
        normalizers = normalizers.masked_fill(~allowed.any(-1, keepdim=True), NO_KEYS)
    return torch.matmul(weights.to(q.dtype), v), normalizers


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = torch.matmul(q, k.mT).to(_wide(q.dtype)) * scale
    return scores if mask is None or mask.dtype == torch.bool else scores + mask


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, number: float) -> torch.Tensor:
    """Return scores with a number where a boolean mask is false."""
    return scores if mask is None or mask.dtype != torch.bool else scores.masked_fill(~mask, number)
