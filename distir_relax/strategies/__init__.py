"""How work is divided: degrees of parallelism, the builder of programs."""

from distir_relax.strategies.builder import FunctionBuilder, ProgramBuilder
from distir_relax.strategies.strategy import Strategy

__all__ = ["FunctionBuilder", "ProgramBuilder", "Strategy"]
