"""Machines whose times can be worked out by hand: whole seconds, no overheads, links as one likes."""

from __future__ import annotations

import math

from distir_relax.cost.profile import Level, Matrix, Profile


def machine(
    devices: int = 8,
    levels: tuple[Level, ...] = (Level("link", 1 << 20, 1e-6, 1e9),),
    flops: float = 1e9,
    bandwidth: float = math.inf,
    overhead: float = 0.0,
) -> Profile:
    """A machine that computes `flops` operations a second, reads and writes at once unless told otherwise."""
    dtypes = ("float64", "float32")
    return Profile(
        name="by hand",
        devices=devices,
        memory=1e12,
        bandwidth=bandwidth,
        overhead=overhead,
        matrix={dtype: Matrix(flops) for dtype in dtypes},
        vector=dict.fromkeys(dtypes, flops),
        levels=levels,
    )


def link(latency: float, bandwidth: float) -> tuple[Level, ...]:
    """One level of links for all devices."""
    return (Level("link", 1 << 20, latency, bandwidth),)
