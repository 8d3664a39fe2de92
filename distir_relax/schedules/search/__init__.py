"""A scheduler of our own: orders for unequal stages and little memory, and how far from the best they can be."""

from distir_relax.schedules.search.scheduler import Found, best_order

__all__ = ["Found", "best_order"]
