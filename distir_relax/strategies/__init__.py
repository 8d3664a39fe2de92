"""How work is divided: degrees of parallelism, the builder, the training programs of the paper."""

from distir_relax.strategies.builder import FunctionBuilder, ProgramBuilder
from distir_relax.strategies.mlp import mlp_training
from distir_relax.strategies.strategy import Strategy

__all__ = ["FunctionBuilder", "ProgramBuilder", "Strategy", "mlp_training"]
