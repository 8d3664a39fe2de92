"""Reductions: sums, means, extremes, variances, norms, losses, cumulative sums."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.reduction import (  # noqa: F401
    cross_entropy,
    cumulative,
    losses,
    norms,
    reduce,
    reduction_axes,
    variance,
)
