"""Rotary positions."""

from __future__ import annotations

import torch

from distir_relax.kernels.native import is_small, stored_name
from distir_relax.kernels.native import rotary as native_rotary


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with its halves along the last dim rotated: ``x * cos + concat(-x[h:], x[:h]) * sin``.

    `cos` and `sin` have as many dims as `x` (batch, heads, positions, features), and broadcast to its shape, except in
    the last dim. The order of the result's dims in memory is that of `x`.
    """
    dtype = stored_name(x.dtype)
    if dtype and x.dim() == 4 and cos.dtype == sin.dtype == x.dtype and is_small(x):
        batch, heads, positions, width = x.shape
        x_batch, x_head, x_position, x_feature = x.stride()
        angle_batch, _, angle_position, angle_feature = strides = cos.stride()
        is_plain = cos.shape == sin.shape and sin.stride() == strides and cos.shape[1:] == (1, positions, width)
        if is_plain and x_feature == angle_feature == 1 and (kernel := native_rotary(width, dtype)):
            result = torch.empty_like(x)
            to_batch, to_head, to_position, _ = result.stride()
            step = x.itemsize
            angle_step = step * angle_batch if cos.shape[0] != 1 else 0
            at, cos_at, sin_at, to = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), result.data_ptr()
            for i in range(batch):
                kernel(
                    at + i * step * x_batch, cos_at + i * angle_step, sin_at + i * angle_step, to + i * step * to_batch,
                    positions, heads, x_position, x_head, angle_position, to_position, to_head,
                )  # fmt: skip
            return result
    first, second = x.tensor_split(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
