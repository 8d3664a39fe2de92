"""Memory for the states of requests: reserved for the longest they can get, in use only up to their last token.

Reserved memory is address space: the system gives a page when the program first writes to it. So a state is contiguous,
as kernels want it, and at most one page of each of its runs is partly used. A request that ends returns its pages.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import Manifest, State, local_shape
from distir_relax.kernels.sequence import reserve
from distir_relax.layout import DTYPES
from distir_relax.runtime.arrays import torch_dtype

if TYPE_CHECKING:
    import torch


def new_states(manifest: Manifest, rank: int, length: int, device: str) -> dict[str, torch.Tensor]:
    """Return the states of a sequence of up to `length` tokens before its first one, by name: empty, or zero."""
    states = _states(manifest, rank)
    shapes = [_shape(state, manifest, rank, length) for state in states]
    buffers = _buffers(shapes, [state.tensor.dtype for state in states], device)
    return {
        state.tensor.name: reserve(buffer, 0, state.dim) if state.grows else buffer
        for state, buffer in zip(states, buffers, strict=True)
    }


def bytes_per_token(manifest: Manifest, rank: int) -> int:
    """Return the bytes of a rank's states for each token of a request."""
    return _bytes(manifest, rank, 1) - _bytes(manifest, rank, 0)


def bytes_per_request(manifest: Manifest, rank: int) -> int:
    """Return the bytes of a rank's states of a request without tokens."""
    return _bytes(manifest, rank, 0)


def _states(manifest: Manifest, rank: int) -> list[State]:
    return [state for state in manifest.states if state.tensor.is_on(rank)]


def _shape(state: State, manifest: Manifest, rank: int, length: int) -> tuple[int, ...]:
    sizes = {symbol.name: 1 for symbol in manifest.symbols} | {"past": length}
    return local_shape(state.tensor.at(sizes), manifest.mesh, rank)


def _bytes(manifest: Manifest, rank: int, length: int) -> int:
    return sum(
        math.prod(_shape(state, manifest, rank, length)) * DTYPES[state.tensor.dtype][1]
        for state in _states(manifest, rank)
    )


def _buffers(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], device: str) -> list[torch.Tensor]:
    """Return zero tensors, on the CPU in one mapping that is released with the last of them."""
    import torch

    if device != "cpu":
        return [torch.zeros(s, dtype=torch_dtype(d), device=device) for s, d in zip(shapes, dtypes, strict=True)]
    sizes = [math.prod(shape) * DTYPES[dtype][1] for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0]
    for size in sizes:
        # A cache line, not a page: neighbours share their first and last pages.
        starts.append(starts[-1] + -(-size // 64) * 64)
    mapping = mmap.mmap(-1, max(starts[-1], 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return [
        memory[start : start + size].view(torch_dtype(dtype)).view(shape)
        if size
        else torch.zeros(shape, dtype=torch_dtype(dtype))
        for start, size, dtype, shape in zip(starts[:-1], sizes, dtypes, shapes, strict=True)
    ]
