"""What a rank is given of the machine: its device, its share of the cores, memory that stays with it."""

from __future__ import annotations

import ctypes
import os

from distir_relax.errors import RunError


def rank_device(device: str, local_rank: int) -> str:
    """The device of a rank: "cuda" becomes "cuda:<n>", ranks of a node going round its GPUs.

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
    """Give this rank its share of the node's cores, unless OMP_NUM_THREADS says otherwise.

    Two busy thread pools on the same cores are many times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def keep_memory() -> None:
    """Let this process keep the memory that tensors free, where the C library is glibc.

    By default large blocks go back to the system and come again page by page, which costs a step with many of them more
    than a third of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)
