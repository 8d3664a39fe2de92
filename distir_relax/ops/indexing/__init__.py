"""Indexing ops: lookups, gathers, scatters, sorting, triangular masks."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.indexing import (  # noqa: F401
    embedding_bag,
    gather,
    gather_nd,
    index_bounds,
    kth_value,
    one_hot,
    renormalized_rows,
    scatter,
    searchsorted,
    segment_sum,
    sort,
    take,
    triangular,
)
