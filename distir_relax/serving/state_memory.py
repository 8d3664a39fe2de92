"""Memory of the states of requests: by default what a machine has left beside the weights."""

from __future__ import annotations

from pathlib import Path

from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.requests import StateBytes

_SHARE = 0.9
"""The share of free memory that weights, activations of a step and states may take."""
_ACTIVATIONS = 1 << 28
"""Bytes of a rank for the activations of a step, and the libraries of a process."""
_LEAST = 1 << 28
"""Bytes that a rank has for states in any case; the limits say if they do not suffice."""
_CGROUP = Path("/sys/fs/cgroup")


def default_state_memory(
    manifest: Manifest, max_requests: int, max_length: int | None, device: str = "cpu", replicas: int = 1
) -> int:
    """Return the bytes of a rank for the states of requests, before the weights are loaded.

    It is an equal share of the memory that is free on this machine, or on its GPU, without the weights; at most what
    `max_requests` of the maximum length take, twice: ended requests are kept for others that begin alike.
    """
    mesh = manifest.mesh
    weights = [sum(local_bytes(tensor, mesh, rank) for tensor in manifest.weights) for rank in range(mesh.size)]
    if device == "cuda":
        free = (_free_on_gpu() * _SHARE - max(weights)) / replicas
    else:
        free = (free_memory() * _SHARE / replicas - sum(weights)) / mesh.size
    memory = int(max(free - _ACTIVATIONS, _LEAST))
    if max_length is None:
        return memory
    return min(memory, max(_LEAST, 2 * max_requests * max(StateBytes(manifest).of_kinds(max_length))))


def free_memory() -> int:
    """Return the bytes that processes of this machine, or of this container, can still take."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        return free if limit == "max" else max(0, min(free, int(limit) - used))
    except (OSError, ValueError):
        return free


def _free_on_gpu() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])
