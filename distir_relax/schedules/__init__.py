"""In which order stages of a pipeline work: data, not code that knows a model."""

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
from distir_relax.schedules.search import Found, best_order
from distir_relax.schedules.task import Kind, Order, Shape, Task
from distir_relax.schedules.task_times import Number, Times
from distir_relax.schedules.timeline import Timeline, timeline
from distir_relax.schedules.torch_csv import from_csv, to_csv
from distir_relax.schedules.validate import check, in_turn, needs

__all__ = [
    "Found",
    "Kind",
    "Memory",
    "Number",
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
    "fits",
    "from_csv",
    "grid",
    "in_turn",
    "needs",
    "order_of",
    "peak_activations",
    "schedule",
    "schedule_named",
    "schedule_names",
    "scheduler",
    "search",
    "timeline",
    "to_csv",
    "v_shaped",
    "zero_bubble",
]
