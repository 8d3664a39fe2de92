"""The format of quantized weights, which are (n, k) with n outputs.

    8 bits                values int8 (n, k)            scales float32 (n, 1)
    8 bits in groups      values int8 (n, k / 32, 32)   scales float16 (n, k / 32, 1)
    4 bits in groups      values uint8 (n, k / 32, 16)  scales, minimums float16 (n, k / 32, 1)

A weight is ``values * scales``, or with 4 bits ``values * scales + minimums``. A byte has two of those values: element
i of its group in the lower half, and element i + 16 in the upper half. These are the layouts of GGUF's Q8_0, Q4_0 (with
``minimums = -8 * scales``) and Q4_1. A slice of outputs, or of groups, is a slice of each tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 32
"""Weights of an output that share a scale."""
_LARGEST, _LEVELS = 127, 15
"""The largest values of 8 and of 4 bits."""
_FITS = 4
"""Attempts at a better scale and minimum; the error hardly falls after these."""


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

    weight = _checked(weight)
    _check_range(weight, _LARGEST)
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = _rounded(groups.abs().amax(-1, keepdim=True) / _LARGEST)
    values = torch.round(groups / scales.where(scales > 0, 1)).clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return values, scales.half()


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values, scales and minimums of a weight (n, k), in groups of `GROUP`.

    Scales and minimums start from the range of a group, and are fitted to its values by least squares in turn with
    these; the attempt with the smallest squared error counts. Raises `ValueError` for a weight that float16 has no
    scales or minimums for.
    """
    import torch

    weight = _checked(weight)
    _check_range(weight, _LEVELS)
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    best = attempt = _attempt(groups, (high - low) / _LEVELS, low)
    for _ in range(_FITS):
        attempt = _attempt(groups, *_fitted(groups, attempt[0]))
        is_better = attempt[-1] < best[-1]
        best = [torch.where(is_better, new, old) for new, old in zip(attempt, best, strict=True)]
    values, scales, minimums, _ = best
    lower, upper = values.to(torch.uint8).chunk(2, -1)
    return lower | upper << 4, scales.half(), minimums.half()


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


def _checked(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as float32; raises `ValueError` if it cannot be quantized."""
    if weight.dim() != 2 or weight.shape[1] % GROUP or not weight.shape[1]:
        raise ValueError(f"expected a weight (n, k) with k a multiple of {GROUP}, found {tuple(weight.shape)}")
    weight = weight.float().contiguous()
    if not weight.isfinite().all():
        raise ValueError("expected a weight of finite numbers, found infinity or NaN")
    return weight


def _attempt(groups: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> list[torch.Tensor]:
    """Return the nearest values, with their rounded scales and minimums, and squared errors, all as float32."""
    import torch

    scales, minimums = _rounded(scales), _rounded(minimums)
    values = torch.round((groups - minimums) / scales.where(scales > 0, 1)).clamp(0, _LEVELS)
    errors = (values * scales + minimums - groups).square().sum(-1, keepdim=True)
    return [values, scales, minimums, errors]


def _fitted(groups: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minimums with the smallest squared error for given values."""
    mean, center = groups.mean(-1, keepdim=True), values.mean(-1, keepdim=True)
    spread = values - center
    scales = (spread * (groups - mean)).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True).clamp_min(1)
    scales = scales.clamp_min(0)
    return scales, mean - scales * center


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to float16."""
    return numbers.half().float()


def _check_range(weight: torch.Tensor, levels: int) -> None:
    """Raise `ValueError` for a weight that float16 has no scales or minimums for, with values of up to `levels`.

    The smallest numbers of float16 are multiples of one step. Rounding scales to these may be as wrong as rounding the
    values is, but no more. That counts for the largest numbers of a weight: much smaller groups become zero.
    """
    import torch

    limits = torch.finfo(torch.float16)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    least, most = levels**2 * limits.tiny * limits.eps, limits.max / 2
    if largest and not least <= largest <= most:
        raise ValueError(
            f"expected a weight whose largest number is from {least:.1e} to {most:,.0f}, as float16 has scales for, "
            f"found {largest:.1e}"
        )
