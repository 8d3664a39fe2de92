"""Programs of the distributed stage, made directly: the builder, pipeline schedules."""

from distir_relax.transforms.builder import FunctionBuilder, ProgramBuilder
from distir_relax.transforms.mlp import mlp_training
from distir_relax.transforms.schedules import Schedule, Task, fill_drain, one_forward_one_backward
from distir_relax.transforms.strategy import Strategy

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
