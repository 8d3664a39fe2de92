"""How work is divided: degrees of parallelism, the builder, the training programs of the paper."""

from distir_relax.schedules.orders import Schedule, Task, fill_drain, one_forward_one_backward
from distir_relax.strategies.builder import FunctionBuilder, ProgramBuilder
from distir_relax.strategies.mlp import mlp_training
from distir_relax.strategies.strategy import Strategy

__all__ = [
    "FunctionBuilder",
    "ProgramBuilder",
    "Schedule",
    "Strategy",
    "Task",
    "fill_drain",
    "mlp_training",
    "one_forward_one_backward",
]
