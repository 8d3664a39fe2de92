"""Parallelism strategies, and the builder of distributed programs."""

from distir_relax.strategies.builder import FunctionBuilder, ProgramBuilder
from distir_relax.strategies.strategy import Strategy

__all__ = ["FunctionBuilder", "ProgramBuilder", "Strategy"]
