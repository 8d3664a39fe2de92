"""Recurrent layers: one entry per kind of cell, over all time steps; layers and directions are composed of them."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.recurrence import cells, gradients, layers, onnx_layers  # noqa: F401
