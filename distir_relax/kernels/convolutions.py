"""Convolutions by torch, but for forms in which its kernels read memory that nobody has written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def convolution(
    x: torch.Tensor, weight: torch.Tensor, strides: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:  # fmt: skip
    """Return the convolution of `x` (n, c, ...) with `weight` (m, c / groups, ...), over one to three spatial dims.

    oneDNN of torch 2.13 reads uninitialised memory in bfloat16 with AMX where a result is one column wide, of a kernel
    that is wider than the input: such results are computed in float32.
    """
    run = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    options = (None, tuple(strides), tuple(padding), tuple(dilation), groups)
    if x.dtype == torch.bfloat16 and x.is_cpu and _is_one_column(x, weight, strides, padding, dilation):
        return run(x.float(), weight.float(), *options).to(x.dtype)
    return run(x, weight, *options)


def _is_one_column(
    x: torch.Tensor, weight: torch.Tensor, strides: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Return whether the result has one column, of a kernel of several."""
    reach = dilation[-1] * (weight.shape[-1] - 1)
    return weight.shape[-1] > 1 and (x.shape[-1] + 2 * padding[-1] - reach - 1) // strides[-1] == 0
