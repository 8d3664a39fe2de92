"""Pipeline schedules: the order of tasks on each rank, as data."""

from distir_relax.schedules import classic, search, v_shaped, zero_bubble
from distir_relax.schedules.activation_memory import Memory, check_fits, fits, peak_activations
from distir_relax.schedules.ascii_chart import grid
from distir_relax.schedules.registry import (
    Schedule,
    order_of,
    schedule,
    schedule_named,
    schedule_names,
    scheduler,
)
from distir_relax.schedules.search import OptimizedOrder, best_order
from distir_relax.schedules.task import Kind, Order, Shape, Task
from distir_relax.schedules.task_times import Number, Times
from distir_relax.schedules.timeline import Timeline, timeline
from distir_relax.schedules.torch_csv import from_csv, to_csv
from distir_relax.schedules.validate import check, dependencies, topological_order

__all__ = [
    "Kind",
    "Memory",
    "Number",
    "OptimizedOrder",
    "Order",
    "Schedule",
    "Shape",
    "Task",
    "Timeline",
    "Times",
    "best_order",
    "check",
    "check_fits",
    "classic",
    "dependencies",
    "fits",
    "from_csv",
    "grid",
    "order_of",
    "peak_activations",
    "schedule",
    "schedule_named",
    "schedule_names",
    "scheduler",
    "search",
    "timeline",
    "to_csv",
    "topological_order",
    "v_shaped",
    "zero_bubble",
]
