"""Random numbers by counter: what is drawn for an element depends on a seed and on its position alone.

So a tensor's elements are drawn alike on any number of devices, however it is split, and again in the backward step;
no device keeps a state. Element `i` of seed `s` is drawn from ``mix(s + i * GAMMA)``: SplitMix64 (Steele, Lea, Flood:
Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) with Stafford's mixing function, variant 13, as Java's
``SplittableRandom`` has it. Seeds follow each other by another mixing, that of MurmurHash3, so that the numbers of one
are not those of the next at other positions.

torch's integers have signs: products wrap as unsigned ones do, and a shift to the right is masked.
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
_DRAWN_AT_ONCE = 1 << 15
"""Elements whose numbers stay in a core's cache while they are mixed."""


def next_seed(seed: torch.Tensor) -> torch.Tensor:
    """The seed, an int64 scalar, that follows another: all 2^64 seeds follow one each."""
    return _mixed(seed + _GAMMA, _MURMUR_3)


def dropout(x: torch.Tensor, seed: torch.Tensor, *places: torch.Tensor, rate: float) -> torch.Tensor:
    """`x` with the share `rate` of its elements zero, the others divided by ``1 - rate``.

    `places` has for each dim of `x` what its elements add to the position in the whole tensor, int64: an element is
    drawn at the sum of its places, in units of which the whole tensor has one for each element.
    """
    import torch

    if rate >= 1:
        return x * 0.0
    factors = torch.empty_like(x, memory_format=torch.contiguous_format)
    # 53 bits, as many as a double has: the share is exact to 1e-16.
    least = round(rate * (1 << 53))
    for part, drawn in _drawn(factors, seed, places):
        part.copy_(_shifted(drawn, 11).ge_(least))
    return factors.div_(1 - rate).mul_(x)


def uniform(seed: torch.Tensor, *places: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers from 0 up to 1, of a floating `dtype`, at `places` as `dropout` has them: one dim for each."""
    import torch

    found = torch.empty([len(place) for place in places], dtype=getattr(torch, dtype))
    # As many bits as the dtype has: none is rounded up to 1.
    bits = _BITS[dtype]
    for part, drawn in _drawn(found, seed, places):
        part.copy_(_shifted(drawn, 64 - bits).double().mul_(2.0**-bits))
    return found


_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _drawn(
    like: torch.Tensor, seed: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a contiguous tensor `like`, with the 64 bits that are drawn for each of their elements."""
    import torch

    if not like.numel():
        return
    *outer, last = places or (torch.zeros_like(seed).reshape(1),)
    rows = seed.reshape(1)
    for place in outer:
        rows = (rows.unsqueeze(-1) + place * _GAMMA).reshape(-1)
    last = last * _GAMMA
    whole = like.view(len(rows), len(last))
    step = max(1, _DRAWN_AT_ONCE // len(last))
    for start in range(0, len(rows), step):
        yield whole[start : start + step], _mixed(rows[start : start + step, None] + last, _VARIANT_13)


def _mixed(z: torch.Tensor, rounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """`z`, which is written to, with its bits mixed by rounds of a shift and a factor."""
    for shift, factor in rounds:
        z.bitwise_xor_(_shifted(z, shift))
        if factor != 1:
            z.mul_(factor)
    return z


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """`z` shifted to the right, zeros coming in."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
