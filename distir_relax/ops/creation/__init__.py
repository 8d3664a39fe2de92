"""Tensors made from numbers alone: constants, fillings, ranges, grids."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.creation import arange, constant, fill, meshgrid, uniform  # noqa: F401
