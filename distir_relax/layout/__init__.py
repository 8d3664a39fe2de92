"""Layout of global tensors on devices: meshes, placements, cuts, and local shards."""

from distir_relax.layout.collectives import Collective, collective_between
from distir_relax.layout.cut import Cut, Interval, Segment, intersect
from distir_relax.layout.dtypes import DTYPES
from distir_relax.layout.local_shards import block_bounds, has_shard, local_intervals, shard_devices
from distir_relax.layout.mesh import DeviceMesh, as_mesh
from distir_relax.layout.placement import (
    REDUCTIONS,
    At,
    Partial,
    Placement,
    R,
    Replicate,
    Routed,
    Shard,
    parse_placement,
    parse_placements,
    print_placements,
)

__all__ = [
    "DTYPES",
    "REDUCTIONS",
    "At",
    "Collective",
    "Cut",
    "DeviceMesh",
    "Interval",
    "Partial",
    "Placement",
    "R",
    "Replicate",
    "Routed",
    "Segment",
    "Shard",
    "as_mesh",
    "block_bounds",
    "collective_between",
    "has_shard",
    "intersect",
    "local_intervals",
    "parse_placement",
    "parse_placements",
    "print_placements",
    "shard_devices",
]
