"""Attributes of all kinds of devices as one, where a number is equal to none."""

from __future__ import annotations

import math

from distir_relax.ir import PerRank, classify_devices
from distir_relax.lowering.distributed_builder import merge_attrs


def test_a_nan_is_the_same_for_all() -> None:
    kinds = classify_devices(((3, 2, 2),), 3)
    rows = [{"fill": math.nan, "size": size, "both": (math.nan, size)} for size in (3, 2)]
    merged = merge_attrs(rows, kinds)
    assert merged["size"] == PerRank((3, 2, 2))
    assert merged["fill"] is math.nan
    assert merged["both"] == (math.nan, PerRank((3, 2, 2)))
