"""Contractions: matrix products, grouped products, einsum, attention."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.contraction import (  # noqa: F401
    attention,
    attention_gradient,
    attention_of_states,
    attention_parts,
    einsum,
    grouped,
    matmul,
    onnx_quantized,
    quantized,
    quantized_grouped,
)
