"""Resources of a rank: device, share of the cores, retained memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from distir_relax.errors import RunError


def rank_device(device: str, local_rank: int) -> str:
    """Return the device of a rank: "cuda" becomes "cuda:<n>", assigned round-robin on each node.

    Raises RunError for an unknown device, or when there is no GPU.
    """
    if device == "cpu":
        return device
    import torch

    if not device.startswith("cuda"):
        raise RunError(f"unknown device {device!r}", hint="devices: cpu, cuda")
    if not torch.cuda.is_available():
        raise RunError("no CUDA device is usable here", hint="run with --device cpu")
    return f"cuda:{local_rank % torch.cuda.device_count()}" if device == "cuda" else device


def limit_threads(local_size: int) -> None:
    """Limit this rank to its share of the node's cores, unless OMP_NUM_THREADS is set.

    Two busy thread pools on the same cores are many times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def release_freed_memory() -> None:
    """Return memory that tensors freed to the system, as far as glibc has it; no effect with other C libraries."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def retain_freed_memory() -> None:
    """Make glibc keep the memory that tensors free; no effect with other C libraries.

    By default large blocks return to the system and are faulted in again page by page, which costs a step with many of
    them more than a third of its time. Called before weights are packed it would keep their originals, too.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
