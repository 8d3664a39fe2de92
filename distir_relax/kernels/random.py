"""Counter-based random numbers: the number of an element depends only on a seed and its position.

So results do not depend on how a tensor is split over devices, the backward step can draw the same numbers again, and
no device has a generator state. Element `i` of seed `s` is drawn from ``mix(s + i * GAMMA)``: SplitMix64 (Steele, Lea,
Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) with Stafford's mixing function, variant 13, as in
Java's ``SplittableRandom``. The next seed uses another mixing function, that of MurmurHash3, so that its numbers are
not those of the previous one at other positions.

torch's integers are signed: products wrap like unsigned ones, and right shifts are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15 - _WORD
_VARIANT_13 = ((30, 0xBF58476D1CE4E5B9 - _WORD), (27, 0x94D049BB133111EB - _WORD), (31, 1))
_MURMUR_3 = ((33, 0xFF51AFD7ED558CCD - _WORD), (33, 0xC4CEB9FE1A85EC53 - _WORD), (33, 1))
_BLOCK_SIZE = 1 << 15
"""Number of elements per block, which stays in a core's cache while it is mixed."""


def next_seed(seed: torch.Tensor) -> torch.Tensor:
    """Return the successor of a seed, an int64 scalar: a bijection of all 2^64 seeds."""
    return _mix(seed + _GAMMA, _MURMUR_3)


def dropout(x: torch.Tensor, seed: torch.Tensor, *places: torch.Tensor, rate: float) -> torch.Tensor:
    """Return `x` with a fraction `rate` of its elements set to zero, the others divided by ``1 - rate``.

    `places` has for each dim of `x` the int64 contributions of its indices to the position in the global tensor: the
    position of an element is their sum, and is distinct for each element of the global tensor.
    """
    import torch

    if rate >= 1:
        return x * 0.0
    factors = torch.empty_like(x, memory_format=torch.contiguous_format)
    # 53 bits, as in a double: the fraction is exact to 1e-16.
    threshold = round(rate * (1 << 53))
    for block, bits in _draw(factors, seed, places):
        block.copy_(_shift_right(bits, 11).ge_(threshold))
    return factors.div_(1 - rate).mul_(x)


def uniform(seed: torch.Tensor, *places: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return numbers in [0, 1) of a floating `dtype`, at `places` as in `dropout`, with one dim for each."""
    import torch

    result = torch.empty([len(place) for place in places], dtype=getattr(torch, dtype), device=seed.device)
    # As many bits as the dtype's significand, so that none is rounded up to 1.
    mantissa_bits = _BITS[dtype]
    for block, drawn in _draw(result, seed, places):
        block.copy_(_shift_right(drawn, 64 - mantissa_bits).double().mul_(2.0**-mantissa_bits))
    return result


_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _draw(
    like: torch.Tensor, seed: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield blocks of a contiguous tensor `like`, with 64 random bits for each of their elements."""
    import torch

    if not like.numel():
        return
    *outer, columns = places or (torch.zeros_like(seed).reshape(1),)
    rows = seed.reshape(1)
    for place in outer:
        rows = (rows.unsqueeze(-1) + place * _GAMMA).reshape(-1)
    columns = columns * _GAMMA
    flat = like.view(len(rows), len(columns))
    step = max(1, _BLOCK_SIZE // len(columns))
    for start in range(0, len(rows), step):
        yield flat[start : start + step], _mix(rows[start : start + step, None] + columns, _VARIANT_13)


def _mix(z: torch.Tensor, rounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Mix the bits of `z`, in place, by rounds of a shift and a factor."""
    for shift, factor in rounds:
        z.bitwise_xor_(_shift_right(z, shift))
        if factor != 1:
            z.mul_(factor)
    return z


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift `z` right logically."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
