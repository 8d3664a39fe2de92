"""Complex numbers as pairs of real ones, and Fourier transforms as matrix products, without entries of their own."""

# A module enters its spellings in the table when it is imported.
from distir_relax.ops.spectral import arithmetic, fourier  # noqa: F401
