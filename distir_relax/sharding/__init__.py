"""Sharding: annotations, propagation of layouts, and redistribution."""

from distir_relax.sharding.delay_reductions import DelayReductions
from distir_relax.sharding.factors import Factoring, factorize
from distir_relax.sharding.layout_comments import layout_comments
from distir_relax.sharding.named_annotations import ApplyShardings, matched_inputs
from distir_relax.sharding.nonfinite import NonfiniteValues, find_nonfinite
from distir_relax.sharding.propagate import Propagate
from distir_relax.sharding.reshard_cost import Reshard, call_counts, list_reshards
from distir_relax.sharding.reshard_plan import Transition, bytes_sent, cost, plan, plan_bytes, transition_cost

__all__ = [
    "ApplyShardings",
    "DelayReductions",
    "Factoring",
    "NonfiniteValues",
    "Propagate",
    "Reshard",
    "Transition",
    "bytes_sent",
    "call_counts",
    "cost",
    "factorize",
    "find_nonfinite",
    "layout_comments",
    "list_reshards",
    "matched_inputs",
    "plan",
    "plan_bytes",
    "transition_cost",
]
