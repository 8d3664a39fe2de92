"""Programs of the distributed stage, made directly: the builder, pipeline schedules."""

from distir_relax.transforms.builder import FunctionBuilder, ProgramBuilder
from distir_relax.transforms.schedules import Schedule, Task, fill_drain, one_forward_one_backward

__all__ = ["FunctionBuilder", "ProgramBuilder", "Schedule", "Task", "fill_drain", "one_forward_one_backward"]
