"""Products of float32 with weights that change, as in training: by the fastest kernels at hand.

torch multiplies float32 by MKL, whose kernels for processors of another vendor are slower than oneDNN's, and for
gradients of weights slower than `native.weight_grad`. One core of an EPYC with AVX-512, Gop/s of a product of 1560 rows
with a weight (192, 768), the largest of several runs:

    kernel     x @ w.T   g @ w   g.T @ x
    MKL             88      91        91
    oneDNN         102     100        95
    native                           104

Other dtypes, small products, and processors for which MKL is made, use torch's own.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F

from distir_relax.kernels.native import WEIGHT_GRAD_SCRATCH, Kernel, weight_grad
from distir_relax.kernels.processor import processor_field

_LEAST = 1 << 20
"""Multiplications of the smallest products that are not torch's."""
_LEAST_WIDTH = 96
"""Rows and columns of the smallest gradients of weights: of narrow ones, much of a tile is padding."""
_MOST_THREADS = 4
"""Each thread of `native.weight_grad` copies one of the operands."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``; `weight` is (out, in)."""
    if _is_faster(x, weight, x.numel() * weight.shape[0]):
        return _by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b + bias``; `b` is a weight (in, out), or a stack of matrices."""
    if b.dim() == 2 and _is_faster(a, b, a.numel() * b.shape[1]):
        return _by_onednn(a, b.t(), bias)
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
    if is_wide and _is_faster(a, b, a.numel() * columns) and (kernel := _kernel(threads)) is not None:
        a, b = a.contiguous(), b.contiguous()
        result = a.new_empty(rows, columns)
        places = a.data_ptr(), b.data_ptr(), result.data_ptr(), _scratch(threads).data_ptr()
        kernel(*places, a.numel() // rows, rows, columns, threads)
        return result
    return torch.tensordot(a, b, [[*range(a.dim() - 1)]] * 2)  # type: ignore[no-any-return]


def _kernel(threads: int) -> Kernel | None:
    return weight_grad(threads > 1)


def _scratch(threads: int) -> torch.Tensor:
    """Return the memory for `threads` threads of the kernel, which a rank's own thread keeps: 0.8 MB for each."""
    scratch: torch.Tensor | None = getattr(_local, "scratch", None)
    if scratch is None or len(scratch) < threads:
        scratch = _local.scratch = torch.empty(threads, WEIGHT_GRAD_SCRATCH)
    return scratch


_local = threading.local()


def _is_faster(a: torch.Tensor, b: torch.Tensor, operations: int) -> bool:
    """Return whether these products are faster than torch's."""
    return a.dtype == torch.float32 == b.dtype and a.is_cpu and operations >= _LEAST and _is_of_other_vendor()


@cache
def _is_of_other_vendor() -> bool:
    return processor_field("vendor_id") == "AuthenticAMD" and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
