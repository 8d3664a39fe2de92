"""The communication matrix as the report page draws it: bytes between devices, or between blocks of many."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.analysis.communication_matrix import bytes_between
from distir_relax.analysis.simulation import Simulation

CELLS = 32
"""How many rows and columns a matrix has at most."""


def matrix(simulation: Simulation) -> dict[str, Any]:
    """Names of the rows (senders) and columns, their bytes row by row, and how many devices are in a row.

    A block of devices is a whole number of the profile's innermost units where there are that many devices.
    """
    devices = simulation.devices
    block = block_size(devices, simulation.profile.levels[0].size)
    sent = bytes_between(simulation.module)
    found = sent.between(np.arange(devices) // block)
    firsts = range(0, devices, block)
    names = [str(d) if block == 1 else f"{d}-{min(d + block, devices) - 1}" for d in firsts]
    return {"names": names, "bytes": found.tolist(), "block": block, "total": float(sent.bytes.sum())}


def block_size(devices: int, unit: int) -> int:
    """How many devices share a row: 1, or as many units of `unit` devices as it takes, or less than a unit."""
    if devices <= CELLS:
        return 1
    least = -(-devices // CELLS)
    if least >= unit:
        return -(-least // unit) * unit
    return next(n for n in range(least, unit + 1) if unit % n == 0)
