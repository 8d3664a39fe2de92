"""Recurrent layers: one entry for each kind of cell, over a sequence's steps; layers and directions are spelled."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.recurrence import cells, gradients, layers, onnx_layers  # noqa: F401
