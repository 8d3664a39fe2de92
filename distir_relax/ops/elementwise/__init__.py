"""Elementwise ops with broadcasting: arithmetic, functions, comparisons, activations, casts."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.elementwise import (  # noqa: F401
    activations,
    arithmetic,
    casts,
    dropout,
    functions,
    gated,
    logic,
    ordered_sum,
    pointwise,
    rotary,
    seed,
)
