"""The format of quantized weights, which are (n, k) with n outputs.

    8 bits                values int8 (n, k)            scales float32 (n, 1)
    8 bits in groups      values int8 (n, k / 32, 32)   scales float16 (n, k / 32, 1)
    4 bits in groups      values uint8 (n, k / 32, 16)  scales, minimums float16 (n, k / 32, 1)

A weight is ``values * scales``, or with 4 bits ``values * scales + minimums``. A byte has two of those values: element
i of its group in the lower half, and element i + 16 in the upper half. These are the layouts of GGUF's Q8_0, Q4_0 (with
``minimums = -8 * scales``) and Q4_1. A slice of outputs, or of groups, is a slice of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 32
"""Weights of an output that share a scale."""
_LARGEST, _LEVELS = 127, 15
"""The largest values of 8 and of 4 bits."""
_BLOCK = 1 << 19
"""Numbers that are quantized at once."""
_NOT_FINITE = "expected a weight of finite numbers, found infinity or NaN"
_FITS = 3
"""Attempts at a better scale and minimum; the error hardly falls after these."""
_PART_OF_RANGE = 0.97
"""Of the range of a group, that of its values at first: fewer attempts reach the same error than from all of it."""


def parts_of(dtype: str) -> int:
    """Return the number of tensors of a weight, by the dtype of its values."""
    return 3 if dtype == "uint8" else 2


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of a weight (n, k), with one scale for each output."""
    import torch

    weight = _checked(weight)
    scales = weight.abs().amax(1, keepdim=True) / _LARGEST
    values = torch.round(weight / scales.where(scales > 0, 1)).to(torch.int8)
    return values, scales


def quantize_int8_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of a weight (n, k), with a scale for each group.

    Raises `ValueError` for a weight that float16 has no scales for.
    """
    import torch

    _check_range(weight, _LARGEST)
    n, groups = weight.shape[0], weight.shape[1] // GROUP
    values = torch.empty(n, groups, GROUP, dtype=torch.int8)
    scales = torch.empty(n, groups, 1, dtype=torch.float16)

    def quantize(rows: slice, block: torch.Tensor) -> None:
        scale = _rounded(block.abs().amax(0) / _LARGEST)
        block.div_(scale.where(scale > 0, 1)).round_().clamp_(-_LARGEST, _LARGEST)
        values[rows] = block.t().view(-1, groups, GROUP)
        scales[rows] = scale.view(-1, groups, 1)

    _for_each_block(weight, quantize)
    return values, scales


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values, scales and minimums of a weight (n, k), in groups of `GROUP`.

    Scales and minimums start from most of the range of a group, and are fitted to its values by least squares in turn
    with these; the attempt with the smallest squared error counts. Raises `ValueError` for a weight that float16 has
    no scales or minimums for.
    """
    import torch

    _check_range(weight, _LEVELS)
    n, groups = weight.shape[0], weight.shape[1] // GROUP
    values = torch.empty(n, groups, GROUP // 2, dtype=torch.uint8)
    scales, minimums = (torch.empty(n, groups, 1, dtype=torch.float16) for _ in range(2))

    def quantize(rows: slice, block: torch.Tensor) -> None:
        quantized, *numbers = _quantize_int4_block(block)
        lower, upper = quantized.to(torch.uint8).chunk(2)
        values[rows] = (lower | upper << 4).t().view(-1, groups, GROUP // 2)
        for target, number in zip((scales, minimums), numbers, strict=True):
            target[rows] = number.view(-1, groups, 1)

    _for_each_block(weight, quantize)
    return values, scales, minimums


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the weight (n, k) of `dtype`, by default float32, computed in float32."""
    import torch

    if minimums is None:
        weight = values.float() * scales
    else:
        weight = torch.cat([values & 0xF, values >> 4], -1).float() * scales + minimums
    return weight.flatten(1).to(dtype or torch.float32)


def _for_each_block(weight: torch.Tensor, quantize: Callable[[slice, torch.Tensor], None]) -> None:
    """Call a function with rows of a weight that a core's cache holds, as float32 (`GROUP`, groups), on all threads.

    Sums over a group are then sums of rows.
    """
    import torch

    size = max(1, _BLOCK // weight.shape[1])
    blocks = [slice(start, start + size) for start in range(0, weight.shape[0], size)]

    def run(rows: slice) -> None:
        groups = weight[rows].reshape(-1, GROUP).t()
        quantize(rows, groups.to(torch.float32, memory_format=torch.contiguous_format, copy=True))

    threads = torch.get_num_threads()
    if threads == 1 or len(blocks) < threads:
        for rows in blocks:
            run(rows)
        return
    try:
        # A thread takes a block; two on each op of a block would wait for each other.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(run, blocks))
    finally:
        torch.set_num_threads(threads)


def _quantize_int4_block(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, scales and minimums of groups in columns, all as float32."""
    import torch

    low, high = groups.amin(0), groups.amax(0)
    mean = groups.sum(0).div_(GROUP)
    centered = groups.sub_(mean)
    half = (high - low).mul_(_PART_OF_RANGE / 2)
    scales, minimums = _rounded(half * (2 / _LEVELS)), _rounded((high + low).div_(2).sub_(half))
    values, products = torch.empty_like(centered), torch.empty_like(centered)
    best, least = (scales, minimums), None
    for attempt in range(_FITS + 1):
        # A minimum is rounded with the mean, which the groups are without.
        shift = minimums - mean
        _nearest(centered, scales, shift, values)
        # The terms of the squared error, whose minimum for these values is the next attempt.
        total, squares = values.sum(0), torch.mul(values, values, out=products).sum(0)
        product = torch.mul(values, centered, out=products).sum(0)
        error = scales * (scales * squares + 2 * (shift * total - product)) + GROUP * shift.square()
        if least is None:
            least = error
        else:
            is_better = error < least
            best = scales.where(is_better, best[0]), minimums.where(is_better, best[1])
            least = error.where(is_better, least)
        if attempt < _FITS:
            center = total / GROUP
            scale = (product / (squares - center * total).clamp_min_(1)).clamp_min_(0)
            scales, minimums = _rounded(scale), _rounded(mean - scale * center)
    _nearest(centered, best[0], best[1] - mean, values)
    return values, *best


def _nearest(centered: torch.Tensor, scales: torch.Tensor, shift: torch.Tensor, values: torch.Tensor) -> None:
    """Write the nearest values to numbers that are ``values * scales + shift``."""
    import torch

    inverse = scales.where(scales > 0, 1).reciprocal_()
    torch.addcmul(shift.neg().mul_(inverse), centered, inverse, out=values).round_().clamp_(0, _LEVELS)


def _check_shape(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] % GROUP or not weight.shape[1]:
        raise ValueError(f"expected a weight (n, k) with k a multiple of {GROUP}, found {tuple(weight.shape)}")


def _checked(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as float32; raises `ValueError` if it cannot be quantized."""
    _check_shape(weight)
    weight = weight.float().contiguous()
    if not weight.isfinite().all():
        raise ValueError(_NOT_FINITE)
    return weight


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to float16."""
    return numbers.half().float()


def _check_range(weight: torch.Tensor, levels: int) -> None:
    """Raise `ValueError` for a weight that float16 has no scales or minimums for, with values of up to `levels`.

    The smallest numbers of float16 are multiples of one step. Rounding scales to these may be as wrong as rounding the
    values is, but no more. That counts for the largest numbers of a weight: much smaller groups become zero.
    """
    import torch

    _check_shape(weight)
    limits = torch.finfo(torch.float16)
    low, high = (float(number) for number in weight.aminmax()) if weight.numel() else (0.0, 0.0)
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(_NOT_FINITE)
    largest = max(-low, high)
    least, most = levels**2 * limits.tiny * limits.eps, limits.max / 2
    if largest and not least <= largest <= most:
        raise ValueError(
            f"expected a weight whose largest number is from {least:.1e} to {most:,.0f}, as float16 has scales for, "
            f"found {largest:.1e}"
        )
