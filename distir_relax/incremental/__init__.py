"""Incremental programs: the next tokens of a sequence, from a program over all of it."""

from distir_relax.incremental.derive import Incremental

__all__ = ["Incremental"]
