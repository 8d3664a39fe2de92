"""Tensors created without operands: constants, fills, ranges, grids, functions of indices, random numbers."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.creation import fill, indexed, uniform  # noqa: F401
