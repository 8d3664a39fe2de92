"""Tensors created without operands: constants, fills, ranges, grids, random numbers."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.creation import fill, uniform  # noqa: F401
