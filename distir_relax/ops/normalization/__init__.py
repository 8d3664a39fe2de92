"""Normalization: softmax, layer, batch and group norms."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.normalization import batch_norm, group_norm, layer_norm, softmax  # noqa: F401
