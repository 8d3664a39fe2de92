"""How each tensor is laid out over the mesh: annotations, propagation, redistribution."""

from distir_relax.sharding.apply import ApplyShardings
from distir_relax.sharding.factors import Factoring, factorize
from distir_relax.sharding.hazards import Hazards, hazards_in
from distir_relax.sharding.propagate import Propagate
from distir_relax.sharding.redistribute import Transition, bytes_sent, cost, plan, transition_cost, transitions_bytes
from distir_relax.sharding.redistributions import Redistribution, redistributions, times_of
from distir_relax.sharding.reductions import DelayReductions
from distir_relax.sharding.remarks import remarks

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
