"""Numeric limits of dtypes."""

from __future__ import annotations

import math

from distir_relax.layout import DTYPES


def number_range(dtype: str) -> tuple[float, float]:
    """Return the smallest and largest padding value of a dtype: infinities for floats.

    torch passes the padding value as a float64, which cannot represent every large int64: the largest is 2**63 - 1024.
    """
    if "float" in dtype:
        return -math.inf, math.inf
    if dtype == "bool":
        return 0, 1
    bits = 8 * DTYPES[dtype][1]
    least, most = (0, 2**bits - 1) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return least, most if bits < 64 else 2**63 - 1024
