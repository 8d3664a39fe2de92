"""How each tensor is laid out over the mesh: annotations, propagation, redistribution."""

from distir_relax.sharding.delay_reductions import DelayReductions
from distir_relax.sharding.factors import Factoring, factorize
from distir_relax.sharding.layout_comments import remarks
from distir_relax.sharding.named_annotations import ApplyShardings
from distir_relax.sharding.nonfinite import Hazards, hazards_in
from distir_relax.sharding.propagate import Propagate
from distir_relax.sharding.reshard_cost import Redistribution, redistributions, times_of
from distir_relax.sharding.reshard_plan import Transition, bytes_sent, cost, plan, transition_cost, transitions_bytes

__all__ = [
    "ApplyShardings",
    "DelayReductions",
    "Factoring",
    "Hazards",
    "Propagate",
    "Redistribution",
    "Transition",
    "bytes_sent",
    "cost",
    "factorize",
    "hazards_in",
    "plan",
    "redistributions",
    "remarks",
    "times_of",
    "transition_cost",
    "transitions_bytes",
]
