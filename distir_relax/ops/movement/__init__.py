"""Data movement without computation: reshapes, permutations, slices, padding, repetition."""

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
