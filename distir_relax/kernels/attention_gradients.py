"""Gradients of attention: by a native kernel, or by products of torch on parts of the batch, the heads and the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from distir_relax.kernels import attention
from distir_relax.kernels.attention import has_bounds, is_causal, row_blocks
from distir_relax.kernels.native import (
    LANES,
    LEAST_SCORES,
    Capability,
    Kernel,
    attention_grad,
    gradient_scratch,
    host_target,
    stored_name,
)
from distir_relax.kernels.recording import recording


def attention_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries (b, h, s, d), keys (b, h, t, d) and values (b, h, t, e) of attention.

    `grad` is that of its result, (b, h, s, e). `mask` is boolean, or added to the scores, and broadcasts to
    (b, h, s, t), or has bounds, as for `attention.attend`. If `causal`, row `i` attends to the keys up to `i`. The
    gradients have the shapes and dtypes of queries, keys and values, and their order of dims in memory.
    """
    if (found := recording()) is not None and mask is not None and has_bounds(mask) and found.computes(mask):
        return found.whole(attention_grads, q, k, v, grad, mask, scale, causal)
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if mask is not None and is_causal(mask, q.shape[2], k.shape[2]):
        mask, causal = None, True
    if 0 in (*q.shape[:3], k.shape[2]):
        for result in results:
            result.zero_()
    elif (kernel := _kernel(q, k, v, grad, mask)) is not None:
        _run_samples(kernel, (q, k, v, grad), results, mask, scale, causal)
    elif found is not None:
        return found.whole(attention_grads, q, k, v, grad, mask, scale, causal)
    else:
        if causal:
            mask = _causal_mask(mask, q, k)
        for block in _parts(q, k):
            of_block = None if mask is None else _part_of_mask(mask, block)
            _write_part((q[block], k[block], v[block], grad[block]), [x[block] for x in results], of_block, scale)
    return results


def grads_natively(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, mask: torch.Tensor | None, scale: float,
    of_rows: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Return `attention_parts.attention_part_grads` by the native kernel, `of_rows` its normalizers and means.

    None if it cannot be.
    """
    is_of_all = mask is None or has_bounds(mask)
    if not is_of_all or 0 in (*q.shape[:3], k.shape[2]) or (kernel := _kernel(q, k, v, grad, mask)) is None:
        return None
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _run_samples(kernel, (q, k, v, grad), results, mask, scale, False, [x.float().contiguous() for x in of_rows])
    return results


def _write_part(
    operands: tuple[torch.Tensor, ...], results: list[torch.Tensor], mask: torch.Tensor | None, scale: float
) -> None:
    """Write the gradients of a part of the batch and the heads, a block of rows at a time."""
    q, k, v, grad = operands
    blocks = [(block, keys, allowed) for block, keys, allowed in row_blocks(q, k, mask) if keys is not None]
    if len(blocks) == 1 and blocks[0][:2] == (slice(0, q.shape[2]), slice(0, k.shape[2])):
        for result, value in zip(results, _by_torch(q, k, v, grad, blocks[0][2], scale), strict=True):
            result.copy_(value)
        return
    # The gradients of keys and values are sums over the blocks.
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v)]
    results[0].zero_()
    for block, keys, allowed in blocks:
        of_rows, *of_keys = _by_torch(q[:, :, block], k[:, :, keys], v[:, :, keys], grad[:, :, block], allowed, scale)
        results[0][:, :, block] = of_rows
        for total, value in zip(sums, of_keys, strict=True):
            total[:, :, keys] += value
    for result, total in zip(results[1:], sums, strict=True):
        result.copy_(total)


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, mask: torch.Tensor | None
) -> Kernel | None:
    """Return the native kernel for these tensors; None if there is none, or it is slower."""
    dtype = stored_name(q.dtype) if q.is_cpu and q.dtype == k.dtype == v.dtype == grad.dtype else None
    is_added = mask is not None and mask.dtype != torch.bool and not has_bounds(mask)
    if dtype is None or is_added or 0 in (q.shape[3], v.shape[3]):
        return None
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] < LEAST_SCORES or _has_tiles(dtype):
        return None
    is_masked = mask is not None and not has_bounds(mask)
    return attention_grad(q.shape[3], v.shape[3], dtype, is_masked)


def _has_tiles(dtype: str) -> bool:
    """Return whether torch multiplies tiles of a dtype (AMX), which the kernel, in float32, does not use."""
    return dtype == "bfloat16" and host_target().can(Capability.BFLOAT16_TILES)


def _run_samples(
    kernel: Kernel, operands: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None, scale: float, causal: bool, of_rows: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    """Run the kernel for the parts of the batch that have the same bounds."""
    for part, of_part in _samples(mask, len(operands[0])):
        given, written, rows = ([x[part] for x in tensors] for tensors in (operands, results, of_rows))
        _run(kernel, tuple(given), tuple(written), of_part, scale, causal, rows)


def _run(
    kernel: Kernel, operands: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None, scale: float, causal: bool, of_rows: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    (batch, heads, rows, width), (tokens, value_width) = operands[0].shape, operands[2].shape[2:]
    operands = tuple(x if x.stride(3) == 1 else x.contiguous() for x in operands)
    # An empty tensor like one whose last dim is not the innermost has that order too.
    written = [x if x.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype) for x in results]
    places = [number for x in (*operands, *written) for number in (x.data_ptr(), *x.stride()[:3])]
    bounds = _bounds(mask, rows, tokens, causal)
    by_lanes = None if mask is None or has_bounds(mask) else _mask_by_lanes(mask, rows, tokens)
    if by_lanes is None:
        places += [0, 0, 0]
    else:
        places += [by_lanes.data_ptr(), *(0 if by_lanes.shape[d] == 1 else by_lanes.stride(d) for d in (0, 1))]
    threads = min(torch.get_num_threads(), batch * heads)
    scratch = torch.empty(threads, gradient_scratch(rows, tokens, width, value_width), dtype=torch.float32)
    places += [bounds.data_ptr(), scratch.data_ptr(), *([x.data_ptr() for x in of_rows] or [0, 0])]
    kernel(*places, batch * heads, heads, rows, tokens, scale, threads)
    for result, value in zip(results, written, strict=True):
        if result is not value:
            result.copy_(value)


def _bounds(mask: torch.Tensor | None, rows: int, tokens: int, causal: bool) -> torch.Tensor:
    """Return the first key that each row attends to at most, and the one after the last."""
    bounds = torch.tensor([0, tokens]) if mask is None or not has_bounds(mask) else mask.clamp(0, tokens)
    bounds = bounds.expand(rows, 2).contiguous()
    if causal:
        bounds[:, 1] = torch.minimum(bounds[:, 1], torch.arange(1, rows + 1))
    return bounds


def _causal_mask(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return a mask that lets each row attend to keys up to its own only."""
    rows, tokens = q.shape[2], k.shape[2]
    if mask is None or has_bounds(mask):
        return _bounds(mask, rows, tokens, causal=True).to(q.device)
    before = torch.ones(rows, tokens, dtype=torch.bool, device=q.device).tril()
    return mask & before if mask.dtype == torch.bool else mask.masked_fill(~before, torch.finfo(mask.dtype).min)


def _mask_by_lanes(mask: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Return a boolean mask as float32 (b or 1, h or 1, tokens, lanes), negative where it is false."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    mask = mask.expand(-1, -1, rows, tokens)
    result = torch.zeros((*mask.shape[:2], tokens, -(-rows // LANES) * LANES), dtype=torch.float32)
    result[..., :rows] = torch.where(mask.mT, 0.0, -1.0)
    return result


def _parts(q: torch.Tensor, k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return parts of the batch and the heads with at most `attention.MOST_SCORES` scores, or one head."""
    (batch, heads, rows, _), tokens = q.shape, k.shape[2]
    most_heads = max(1, min(heads, attention.MOST_SCORES // (rows * tokens)))
    most_batch = max(1, min(batch, attention.MOST_SCORES // (rows * tokens * heads)))
    starts = product(range(0, batch, most_batch), range(0, heads, most_heads))
    return [(slice(i, i + most_batch), slice(j, j + most_heads)) for i, j in starts]


def _samples(mask: torch.Tensor | None, batch: int) -> list[tuple[slice, torch.Tensor | None]]:
    """Return the parts of the batch that have the same bounds, and these (s, 2); all of it with another mask."""
    if mask is None or not has_bounds(mask) or mask.dim() == 2:
        return [(slice(0, batch), mask)]
    parts = [slice(n, n + 1) for n in range(batch)] if len(mask) > 1 else [slice(0, batch)]
    return list(zip(parts, mask, strict=True))


def _part_of_mask(mask: torch.Tensor, part: tuple[slice, slice]) -> torch.Tensor:
    if has_bounds(mask):
        return mask[part[0]] if mask.dim() == 3 and len(mask) > 1 else mask
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    return mask[tuple(whole if size > 1 else slice(None) for whole, size in zip(part, mask.shape, strict=False))]


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of some rows; the mask is boolean, or added to the scores."""
    scores = torch.matmul(q, k.mT) * scale
    allowed = mask if mask is not None and mask.dtype == torch.bool else None
    if mask is not None and allowed is None:
        scores = scores + mask
    if allowed is None:
        weights = torch.softmax(scores, -1)
    else:
        # Finite, so that a row without keys is not NaN.
        masked = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
        weights = torch.where(allowed, torch.softmax(masked, -1), 0.0)
    del scores
    of_weights = torch.matmul(grad, v.mT)
    mean = (of_weights * weights).sum(-1, keepdim=True)
    slopes = (of_weights - mean) * weights * scale
    return torch.matmul(slopes, k), torch.matmul(slopes.mT, q), torch.matmul(weights.mT, grad)
