"""Incremental programs: the next tokens of a sequence, from a program over all of it."""

from distir_relax.incremental.compute_once import ComputeOnce, EachCall, FirstCall
from distir_relax.incremental.derive import Incremental
from distir_relax.incremental.last_positions import LastPositions

__all__ = ["ComputeOnce", "EachCall", "FirstCall", "Incremental", "LastPositions"]
