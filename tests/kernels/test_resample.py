"""What a rank resizes and pools by, against torch's own: whole dims, parts of them, every dtype."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from distir_relax.kernels.resample import Adaptive, Pooling, Resizing, maximum, places, rows_of, weigh
from distir_relax.kernels.sampling import Sampling, taps_of

torch.set_num_threads(1)

MODES = {
    "bilinear": ("linear", "half_pixel", False),
    "bilinear aligned": ("linear", "align_corners", True),
    "bicubic": ("cubic", "half_pixel", False),
    "bicubic aligned": ("cubic", "align_corners", True),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 5e-2}


def sizes(count: int, most: int = 70) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(1, most), draw.randint(1, most)) for _ in range(count)]


def test_the_nearest_element_is_torchs() -> None:
    """Rounded otherwise, an element would be its neighbour."""
    for have in range(1, 90):
        x = torch.arange(have).float().reshape(1, 1, have)
        for want in range(1, 90):
            found = weigh(x, 2, Resizing("nearest_neighbor", "asymmetric"), want)
            assert torch.equal(found, F.interpolate(x, want)), (have, want)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", MODES)
def test_interpolations(mode: str, dtype: torch.dtype) -> None:
    method, place, aligned = MODES[mode]
    for have, want in [*sizes(60), (977, 1201)]:
        x = torch.randn(2, 3, have, 5, generator=torch.Generator().manual_seed(have)).to(dtype)
        for axis, y in ((2, x), (3, x.transpose(2, 3))):
            target = (want, 5) if axis == 2 else (5, want)
            expected = F.interpolate(y, target, mode=mode.split()[0], align_corners=aligned)
            found = weigh(y, axis, Resizing(method, place), want)
            torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_adaptive_pooling(dtype: torch.dtype) -> None:
    for have, want in sizes(60):
        x = torch.randn(2, 3, have, 5, generator=torch.Generator().manual_seed(have)).to(dtype)
        torch.testing.assert_close(
            weigh(x, 2, Adaptive(), want),
            F.adaptive_avg_pool2d(x, (want, 5)),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )
        largest, where = F.adaptive_max_pool2d(x.round(), (want, 2), return_indices=True)
        assert torch.equal(maximum(maximum(x.round(), 2, Adaptive(), want), 3, Adaptive(), 2), largest)
        assert torch.equal(places(x.round(), [Adaptive()] * 2, (want, 2), (5, 1)), where)


def test_an_infinite_element_is_no_reason_for_nan() -> None:
    x = torch.tensor([[[1.0, torch.inf, 2.0, 3.0, -torch.inf]]])
    assert torch.equal(weigh(x, 2, Adaptive(), 2), F.adaptive_avg_pool1d(x, 2))


def test_places_of_pooling() -> None:
    x = torch.randint(-2, 3, (2, 3, 11, 9), generator=torch.Generator().manual_seed(0)).float()
    pool = [Pooling(3, 2, 2, 1), Pooling(2, 1, 1, 0)]
    values, where = F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (2, 1), return_indices=True)
    assert torch.equal(places(x, pool, values.shape[2:], (9, 1)), where)
    with pytest.raises(ValueError, match="a window contains only padding"):
        Pooling(1, 1, 1, 1).taps(3, 5, True)


@pytest.mark.parametrize(
    "sampling", [Adaptive(), Resizing("cubic", "half_pixel"), Resizing("nearest_neighbor", "asymmetric")], ids=str
)
def test_parts_are_parts_of_the_whole(sampling: Sampling) -> None:
    """A part made from just the elements that it reads is bit for bit what the whole has there."""
    x = torch.randn(2, 13, 3, generator=torch.Generator().manual_seed(0))
    whole = weigh(x, 1, sampling, 17)
    for start in range(17):
        for stop in range(start + 1, 18):
            positions = taps_of(sampling, 13, 17, False).positions[start:stop]
            first, last = int(positions.min()), int(positions.max()) + 1
            part = (13, first, 17, start)
            assert rows_of(sampling, last - first, stop - start, part, False).positions.min() == 0
            assert torch.equal(weigh(x[:, first:last], 1, sampling, stop - start, part), whole[:, start:stop])
