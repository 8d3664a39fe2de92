"""How each tensor is laid out over the mesh: annotations, propagation, redistribution."""

from distir_relax.sharding.factors import Factoring, factorize
from distir_relax.sharding.propagate import Propagate, Propagation
from distir_relax.sharding.redistribute import Step, bytes_sent, cost, plan, step_cost, steps_bytes
from distir_relax.sharding.reductions import DelayReductions

__all__ = [
    "DelayReductions",
    "Factoring",
    "Propagate",
    "Propagation",
    "Step",
    "bytes_sent",
    "cost",
    "factorize",
    "plan",
    "step_cost",
    "steps_bytes",
]
