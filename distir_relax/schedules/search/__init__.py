"""Schedule search: orders for unequal stages and limited memory, with a proven bound."""

from distir_relax.schedules.search.scheduler import OptimizedOrder, best_order

__all__ = ["OptimizedOrder", "best_order"]
