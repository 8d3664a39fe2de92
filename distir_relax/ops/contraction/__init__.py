"""Contractions: matrix products, grouped products, einsum, attention."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.contraction import attention, attention_gradient, einsum, grouped, matmul, quantized  # noqa: F401
