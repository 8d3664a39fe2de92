"""Attention with a mask, which is None if it allows everything: often so for one new position."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def unless_all_true(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask, or None if all its elements are true."""
    return None if bool(mask.all()) else mask


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return the attention of queries (b, h, s, d) to keys (b, g, t, d) and values (b, g, t, e): (b, h, s, e).

    `h` is a multiple of `g`: heads in a row share keys and values. `mask` is boolean and broadcasts to (b, h, s, t).
    """
    from torch.nn.functional import scaled_dot_product_attention

    groups, heads = k.shape[1], q.shape[1]
    if groups == heads:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if q.shape[2] == 1 and (mask is None or mask.dim() < 3 or mask.shape[-3] == 1):
        # As rows of one head, the heads of a group read its keys once.
        rows = q.reshape(q.shape[0], groups, heads // groups, q.shape[3])
        y = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        return y.reshape(q.shape[0], heads, 1, v.shape[3])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
