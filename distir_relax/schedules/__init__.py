"""In which order stages of a pipeline work: data, not code that knows a model."""

from distir_relax.schedules.orders import Schedule, Task, fill_drain, one_forward_one_backward

__all__ = ["Schedule", "Task", "fill_drain", "one_forward_one_backward"]
