"""Products of float32 with weights that change, as in training: by the fastest kernels at hand.

torch multiplies float32 by MKL, whose kernels on some processors are slower than oneDNN's, and for gradients of weights
slower than `native.weight_grad`: which is faster is measured. One core of an EPYC with AVX-512, Gop/s of a product of
1560 rows with a weight (192, 768), the largest of several runs:

    kernel     x @ w.T   g @ w   g.T @ x
    MKL             88      91        91
    oneDNN         102     100        95
    native                           104

Other dtypes and small products use torch's own.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F

from distir_relax.kernels.measured import Choice, choose, measured_once
from distir_relax.kernels.native import WEIGHT_GRAD_SCRATCH, weight_grad
from distir_relax.kernels.native.load import kernel_sources
from distir_relax.kernels.packing import by_onednn

_LEAST = 1 << 20
"""Multiplications of the smallest products that are not torch's."""
_LEAST_WIDTH = 96
"""Rows and columns of the smallest gradients of weights: of narrow ones, much of a tile is padding."""
_MOST_THREADS = 4
"""Each thread of `native.weight_grad` copies one of the operands."""
_MEASURED = (1560, 768, 192)
"""Rows, inputs and outputs of the products that are compared."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``; `weight` is (out, in)."""
    if _is_large(x, weight, x.numel() * weight.shape[0]) and _is_onednn_faster(torch.get_num_threads()):
        return by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b + bias``; `b` is a weight (in, out), or a stack of matrices."""
    if b.dim() == 2 and _is_large(a, b, a.numel() * b.shape[1]) and _is_onednn_faster(torch.get_num_threads()):
        return by_onednn(a, b.t(), bias)
    if b.dim() == 2 and a.dim() > 2:
        # Of rows that are no matrix in memory, such as a gradient that was broadcast, torch copies the weight for each
        # of the batch.
        result = torch.mm(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[1])
    else:
        result = torch.matmul(a, b)
    return result if bias is None else result + bias


def linear_weight_grad(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``a[..., n] * b[..., k]`` over all leading dims, (n, k)."""
    rows, columns, threads = a.shape[-1], b.shape[-1], torch.get_num_threads()
    is_wide = min(rows, columns) >= _LEAST_WIDTH and threads <= _MOST_THREADS
    if is_wide and _is_large(a, b, a.numel() * columns) and _is_native_faster(threads):
        return _native_weight_grad(a.contiguous(), b.contiguous(), threads)
    return torch.tensordot(a, b, [[*range(a.dim() - 1)]] * 2)  # type: ignore[no-any-return]


def _native_weight_grad(a: torch.Tensor, b: torch.Tensor, threads: int) -> torch.Tensor:
    kernel = weight_grad()
    assert kernel is not None, "it was compared with torch"
    rows, columns = a.shape[-1], b.shape[-1]
    result = a.new_empty(rows, columns)
    places = a.data_ptr(), b.data_ptr(), result.data_ptr(), _scratch(threads).data_ptr()
    kernel(*places, a.numel() // rows, rows, columns, threads)
    return result


def _scratch(threads: int) -> torch.Tensor:
    """Return the memory for `threads` threads of the kernel, which a rank's own thread keeps: 0.8 MB for each."""
    scratch: torch.Tensor | None = getattr(_local, "scratch", None)
    if scratch is None or len(scratch) < threads:
        scratch = _local.scratch = torch.empty(threads, WEIGHT_GRAD_SCRATCH, dtype=torch.float32)
    return scratch


_local = threading.local()


def _is_large(a: torch.Tensor, b: torch.Tensor, operations: int) -> bool:
    """Return whether these products may be faster than torch's."""
    return a.dtype == torch.float32 == b.dtype and a.is_cpu and operations >= _LEAST


@cache
def _is_onednn_faster(threads: int) -> bool:
    name = f"product-with-a-changing-weight-{threads}-threads"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return measured_once(name, lambda: _measure_product(name)) == "oneDNN"


def _measure_product(name: str) -> Choice:
    rows, inner, outer = _MEASURED
    x, w = torch.ones(rows, inner, dtype=torch.float32), torch.ones(outer, inner, dtype=torch.float32)
    return choose(name, {"torch": lambda: F.linear(x, w), "oneDNN": lambda: by_onednn(x, w, None)})


@cache
def _is_native_faster(threads: int) -> bool:
    name = f"gradient-of-a-weight-{threads}-threads"
    if weight_grad() is None:
        return False
    return measured_once(name, lambda: _measure_gradient(name, threads), kernel_sources()) == "native"


def _measure_gradient(name: str, threads: int) -> Choice:
    rows, inner, outer = _MEASURED
    a, b = torch.ones(rows, outer, dtype=torch.float32), torch.ones(rows, inner, dtype=torch.float32)
    forms = {
        "torch": lambda: torch.tensordot(a, b, [[0], [0]]),
        "native": lambda: _native_weight_grad(a, b, threads),
    }
    return choose(name, forms)


def measure_choices() -> None:
    """Make the choices between products with weights that change, unless they were made on this machine."""
    _is_onednn_faster(torch.get_num_threads())
    _is_native_faster(torch.get_num_threads())
