"""In-place optimizer steps: by native kernels, or in blocks that stay in the cache between operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from distir_relax.kernels.native import adam_step as native_adam_step
from distir_relax.kernels.native import moving_square as native_moving_square
from distir_relax.kernels.native import stored_name, threads_for
from distir_relax.kernels.recording import runs_whole

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16
"""Elements of a block: three float32 tensors and their temporaries take a megabyte."""


def moving_square(square: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
    """``square decay + value value (1 - decay)``, in place of `square`."""
    threads = threads_for(square)
    kernel = native_moving_square() if _is_native(square, value) else None
    if kernel is not None:
        kernel(square.data_ptr(), value.data_ptr(), square.numel(), decay, 1 - decay, threads)
        return square
    for v, g in _blocks(square, value):
        v.mul_(decay).addcmul_(g, g, value=1 - decay)
    return square


@runs_whole
def adam_step(
    weight: torch.Tensor, average: torch.Tensor, square: torch.Tensor, rate: torch.Tensor, size: torch.Tensor,
    floor: torch.Tensor, decay: float,
) -> torch.Tensor:  # fmt: skip
    """``weight (1 - rate decay) - size average / (sqrt(square) + floor)``, in place of `weight`.

    `rate`, `size` and `floor` are scalars.
    """
    import torch

    threads = threads_for(weight)
    kernel = native_adam_step() if _is_native(weight, average, square) else None
    if kernel is not None:
        places = weight.data_ptr(), average.data_ptr(), square.data_ptr()
        kernel(*places, weight.numel(), 1 - float(rate) * decay, float(size), float(floor), threads)
        return weight
    decay_factor = 1 - rate * decay
    for w, m, v in _blocks(weight, average, square):
        if decay:
            w.mul_(decay_factor)
        denominator = v.sqrt().add_(floor)
        w.addcmul_(torch.div(m, denominator, out=denominator), size, value=-1)
    return weight


def _is_native(*tensors: torch.Tensor) -> bool:
    """Return whether native kernels take tensors."""
    return all(t.is_cpu and stored_name(t.dtype) == "float32" and t.is_contiguous() and t.numel() for t in tensors)


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield corresponding blocks of all tensors; whole tensors if small, not contiguous, or not on the CPU."""
    import torch

    first = tensors[0]
    if first.numel() <= BLOCK or first.device.type != "cpu" or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(t.view(-1), BLOCK) for t in tensors), strict=True)
