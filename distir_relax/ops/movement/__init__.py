"""Ops that move elements and compute nothing: shapes, orders, parts, padding, repetition."""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.movement import broadcast, flip, join, pad, permute, pixel_shuffle, repeat, reshape, slice  # noqa: F401
