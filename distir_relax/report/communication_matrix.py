"""Communication matrix of the report page: bytes between devices, or between blocks of devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.simulation.communication_matrix import bytes_between
from distir_relax.simulation.simulation import Simulation

CELLS = 32
"""Maximum number of rows and columns."""


def matrix(simulation: Simulation) -> dict[str, Any]:
    """Return names of the rows (senders) and columns, their bytes row by row, and the number of devices per row.

    A block of devices is a whole number of the profile's innermost units, if there are that many devices.
    """
    devices = simulation.devices
    block = block_size(devices, simulation.profile.levels[0].size)
    sent = bytes_between(simulation.module)
    block_bytes = sent.between(np.arange(devices) // block)
    firsts = range(0, devices, block)
    names = [str(d) if block == 1 else f"{d}-{min(d + block, devices) - 1}" for d in firsts]
    return {"names": names, "bytes": block_bytes.tolist(), "block": block, "total": float(sent.bytes.sum())}


def block_size(devices: int, unit: int) -> int:
    """Return the devices per row: 1, or a multiple of `unit` devices, or a divisor of `unit`."""
    if devices <= CELLS:
        return 1
    least = -(-devices // CELLS)
    if least >= unit:
        return -(-least // unit) * unit
    return next(n for n in range(least, unit + 1) if unit % n == 0)
