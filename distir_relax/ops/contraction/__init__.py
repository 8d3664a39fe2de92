"""Products that sum over a shared dim: matrices, groups of them, einsum, attention."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.contraction import attention, bilinear, einsum, grouped, matmul, routed  # noqa: F401
