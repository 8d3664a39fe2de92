"""Ops that read, write or order elements by position: look-ups, scatters, points, sorting, triangles."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.indexing import (  # noqa: F401
    bounds,
    embedding_bag,
    gather,
    one_hot,
    ordering,
    points,
    scatter,
    search,
    segments,
    selection,
    take,
    triangle,
)
