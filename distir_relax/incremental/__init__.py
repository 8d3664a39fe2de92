"""Incremental programs: the next tokens of a sequence, from a program over all of it."""

from distir_relax.incremental.derive import Incremental
from distir_relax.incremental.last_positions import LastPositions

__all__ = ["Incremental", "LastPositions"]
