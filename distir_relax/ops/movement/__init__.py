"""Ops that move elements and compute nothing: shapes, orders, parts, padding, repetition."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.movement import (  # noqa: F401
    broadcast,
    concat,
    diagonal,
    flip,
    pad,
    permute,
    pixel_shuffle,
    repeat,
    reshape,
    slice,
)
