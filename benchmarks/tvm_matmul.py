"""Time of the tvm backend's product kernels against torch, one thread: ``python benchmarks/tvm_matmul.py``.

For each ``x (m, k) @ weight (k, n)`` prints milliseconds, GFLOP/s and the ratio to `torch.nn.functional.linear` (below
1 is faster than torch). Weights are read cold: each round uses another one, as the layers of a model do.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import time
from collections.abc import Callable
from typing import Any

import torch
import tvm

from distir_relax.runtime.backends.tvm import kernels
from distir_relax.runtime.backends.tvm.compile import machine

SHAPES = [(128, 768, 3072), (128, 3072, 768), (128, 768, 1536), (127, 63, 127), (1, 768, 3072), (128, 768, 25129)]
CACHE_BYTES = 96 << 20


def main() -> None:
    """Print one line per shape."""
    torch.set_num_threads(1)
    print(f"{'m x k x n':>18} {'tvm ms':>9} {'torch ms':>9} {'tvm GF/s':>9} {'ratio':>6}")
    for m, k, n in SHAPES:
        ours, theirs = _measure(m, k, n)
        rate = 2 * m * k * n / ours / 1e9
        print(f"{f'{m} x {k} x {n}':>18} {ours * 1e3:9.3f} {theirs * 1e3:9.3f} {rate:9.0f} {ours / theirs:6.2f}")


def _measure(m: int, k: int, n: int) -> tuple[float, ...]:
    """Median seconds of our kernel and of torch, taken in turns."""
    target, host = machine(1)
    count = max(1, min(64, CACHE_BYTES // (4 * k * n)))
    weights = [torch.randn(n, k) for _ in range(count)]
    x = torch.randn(m, k)
    pack = _compile(kernels.pack(k, n, "float32", True, host), target)
    product = _compile(kernels.packed_product(m, k, n, "float32", host), target)
    packed = [tvm.runtime.empty(kernels.packed_shape(k, n, "float32", host)) for _ in weights]
    for weight, panels in zip(weights, packed, strict=True):
        pack(tvm.runtime.tensor(weight.numpy()), panels)
    left, result = tvm.runtime.tensor(x.numpy()), tvm.runtime.empty((m, n))
    return _medians(
        lambda i: product(left, packed[i % count], result),
        lambda i: torch.nn.functional.linear(x, weights[i % count]),
    )


def _compile(kernel: Any, target: Any) -> Callable[..., None]:
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    compiled: Callable[..., None] = tvm.compile(module, target)["main"]
    return compiled


def _medians(*calls: Callable[[int], object], rounds: int = 24) -> tuple[float, ...]:
    seconds: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 2):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call(i)
            times.append(time.perf_counter() - start)
    return tuple(sorted(times[2:])[rounds // 2] for times in seconds)


if __name__ == "__main__":
    main()
