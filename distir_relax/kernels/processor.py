"""The description of the processor by Linux."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def processor_field(name: str) -> str:
    """Return a field of ``/proc/cpuinfo``, such as ``model name``, of the first processor; empty if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def processor_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets and other features; none if they are unknown."""
    return frozenset(processor_field("flags").split())
