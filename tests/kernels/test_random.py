"""What is drawn: SplitMix64's own numbers, at the rate asked for, at each position apart from all others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from distir_relax.kernels.random import dropout, next_seed, uniform

WORD = (1 << 64) - 1


def split_mix(seed: int, position: int) -> int:
    """SplitMix64 as published, in Python's unbounded integers."""
    z = (seed + position * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def kept(seed: int, rate: float, *shape: int) -> torch.Tensor:
    """Which elements of a tensor of `shape` are kept."""
    places = [torch.arange(n) * math.prod(shape[d + 1 :]) for d, n in enumerate(shape)]
    return dropout(torch.ones(shape, dtype=torch.float64), torch.tensor(seed), *places, rate=rate) > 0


def test_the_generator_is_the_published_one() -> None:
    # The first three numbers of seed 1234567, as Rosetta Code and the reference implementation list them.
    listed = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [split_mix(1234567, i) for i in (1, 2, 3)] == listed


@pytest.mark.parametrize("seed", [0, 1234567, -3, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_an_element_is_drawn_by_its_seed_and_its_position(seed: int, rate: float) -> None:
    expected = [split_mix(seed & WORD, i) / (1 << 64) >= rate for i in range(3 * 5 * 7)]
    assert kept(seed, rate, 3, 5, 7).flatten().tolist() == expected


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_kept_and_elements_are_independent(rate: float) -> None:
    """Of a million elements; neighbours along each dim, equal places of seeds that follow each other, and columns."""
    seeds = [torch.tensor(7)]
    for _ in range(3):
        seeds.append(next_seed(seeds[-1]))
    masks = [kept(int(s), rate, 331, 3023).double() - (1 - rate) for s in seeds]
    count, spread = masks[0].numel(), rate * (1 - rate)
    pairs = [(m[1:], m[:-1]) for m in masks] + [(m[:, 1:], m[:, :-1]) for m in masks]
    pairs += [(m[:, 64:], m[:, :-64]) for m in masks] + list(itertools.pairwise(masks))
    pairs.append((kept(1, rate, 331, 3023).double() - (1 - rate), kept(2, rate, 331, 3023).double() - (1 - rate)))
    # Each is a sum of independent terms: five standard deviations are exceeded once in 1.7 million.
    assert all(abs(float(m.mean())) < 5 * math.sqrt(spread / count) for m in masks)
    assert all(abs(float((a * b).mean())) < 5 * spread / math.sqrt(a.numel()) for a, b in pairs)
    for dim in (0, 1):
        sums = masks[0].sum(dim) / math.sqrt(spread * masks[0].shape[dim])
        assert abs(float(sums.var()) - 1) < 5 * math.sqrt(2 / len(sums))


@pytest.mark.parametrize(("dtype", "bits"), [("float64", 53), ("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_uniform_numbers_are_the_first_bits(dtype: str, bits: int) -> None:
    found = uniform(torch.tensor(5), torch.arange(7) * 127, torch.arange(127), dtype=dtype)
    assert found.dtype == getattr(torch, dtype)
    expected = [(split_mix(5, i) >> (64 - bits)) / (1 << bits) for i in range(7 * 127)]
    assert found.flatten().tolist() == expected


def test_seeds_follow_each_other_without_end_and_apart() -> None:
    seeds = next_seed(torch.arange(-1000, 1000))
    assert len(set(seeds.tolist())) == 2000
    bits = torch.stack([(seeds >> i) & 1 for i in range(64)]).double().mean(1)
    assert float((bits - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(2000)


def test_what_is_kept_is_scaled_as_torch_does() -> None:
    x, place = torch.tensor([math.nan, math.inf, -2.0, 3.0]), torch.arange(4)
    found = dropout(x, torch.tensor(3), place, rate=0.75)
    expected = x * (kept(3, 0.75, 4).float() / 0.25)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(
        dropout(x, torch.tensor(3), place, rate=1.0), torch.nn.functional.dropout(x, 1.0), equal_nan=True
    )
    assert dropout(x[:0], torch.tensor(3), place[:0], rate=0.5).shape == (0,)
    assert dropout(x.half(), torch.tensor(3), place, rate=0.5).dtype == torch.float16
