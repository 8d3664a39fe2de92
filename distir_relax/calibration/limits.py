"""The limits of this device, measured: the fastest products, and reads of memory and of its caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from distir_relax.calibration.measure import synchronize
from distir_relax.calibration.measurements import device_machine
from distir_relax.cost.profile import Level, Matrix, Profile
from distir_relax.kernels.packing import pack_linear
from distir_relax.kernels.quantized import quantize_int8
from distir_relax.kernels.quantized.linear import pack_quantized

_SIZE = 1024
"""Rows, columns and inner size of the products."""
_READ = 1 << 26
"""Elements of float32 in the tensors that are read from memory."""
_CACHED = 1 << 14
_OPERATIONS = 2.0 * _SIZE**3
_SECONDS, _ROUNDS = 0.02, 5
_MOST_SECONDS = 0.3
"""Seconds after which a limit is measured: without instructions for bfloat16, a product in it takes seconds."""


@dataclass(frozen=True)
class Limits:
    """Limits of a device: operations per second of products by dtype, bytes per second from memory and from caches.

    `cache` is the size of the last cache in bytes.
    """

    products: Mapping[str, float]
    bandwidth: float
    cache_bandwidth: float
    cache: float

    def best(self, other: Limits) -> Limits:
        """Return the larger of both for each limit: one of them may have been measured while the device was busy."""
        products = {dtype: max(rate, other.products[dtype]) for dtype, rate in self.products.items()}
        bandwidths = (max(self.bandwidth, other.bandwidth), max(self.cache_bandwidth, other.cache_bandwidth))
        return Limits(products, *bandwidths, self.cache)

    def profile(self) -> Profile:
        """Return the machine on which each op takes the time of its limit: the roofline without any overhead."""
        products = {dtype: Matrix(rate) for dtype, rate in self.products.items()}
        return Profile(
            "limits", 1, 0.0, self.bandwidth, 0.0, products, dict(self.products), (Level("device", 1, 0.0, 1.0),),
            cache=self.cache, cache_bandwidth=self.cache_bandwidth,
        )  # fmt: skip


def measure_limits(device: str = "cpu") -> Limits:
    """Measure a device, with as many threads as torch has now, in about two seconds.

    Each limit is the best of several runs of the fastest kernels at hand, torch's and those of `kernels`.
    """
    import torch

    with torch.inference_mode():
        products = {}
        for dtype in (torch.float32, torch.bfloat16):
            a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype, device=device) for _ in range(2))
            packed = pack_linear(b, rows=_SIZE)
            seconds = [_seconds(partial(torch.matmul, a, b.t()), device), _seconds(partial(packed, a), device)]
            products[str(dtype).removeprefix("torch.")] = _OPERATIONS / min(seconds)
        a = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device=device)
        quantized = pack_quantized(*quantize_int8(a), dtype=a.dtype, rows=_SIZE)
        products["int8"] = max(_OPERATIONS / _seconds(partial(quantized, a), device), *products.values())
        large = torch.ones(_READ // _SIZE, _SIZE, device=device, dtype=torch.float32)
        row = torch.ones(1, _SIZE, device=device, dtype=torch.float32)
        readers = large.sum, partial(torch.mv, large, row[0]), partial(pack_linear(large, rows=1), row)
        read = min(_seconds(reader, device) for reader in readers)
        x, y, z = (torch.ones(_CACHED, device=device, dtype=torch.float32) for _ in range(3))
        cached = _seconds(partial(torch.add, x, y, out=z), device)
        return Limits(products, 4.0 * _READ / read, 12.0 * _CACHED / cached, device_machine(device).cache)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the least time of a run, back to back with others; of slow ones there are fewer."""
    begin = time.perf_counter()
    run()
    synchronize(device)
    best = time.perf_counter() - begin
    for _ in range(_ROUNDS):
        count, start = 0, time.perf_counter()
        if start - begin > _MOST_SECONDS:
            break
        while (taken := time.perf_counter() - start) < _SECONDS or not count:
            run()
            synchronize(device)
            count += 1
        best = min(best, taken / count)
    return best
