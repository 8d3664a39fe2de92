"""Optimizer steps."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.optimizer import updates  # noqa: F401
