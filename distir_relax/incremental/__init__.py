"""Incremental programs: the next tokens of a sequence, from a program over all of it."""

from distir_relax.incremental.derive import Incremental
from distir_relax.incremental.last_position import LastPosition

__all__ = ["Incremental", "LastPosition"]
