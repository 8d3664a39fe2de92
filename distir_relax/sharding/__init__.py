"""How each tensor is laid out over the mesh: annotations, propagation, redistribution."""

from distir_relax.sharding.factors import Factoring, factorize
from distir_relax.sharding.propagate import Gather, Propagate, Propagation
from distir_relax.sharding.redistribute import Step, bytes_sent, cost, plan, step_cost, steps_bytes
from distir_relax.sharding.reductions import DelayReductions
from distir_relax.sharding.traffic import Traffic, traffic

__all__ = [
    "DelayReductions",
    "Factoring",
    "Gather",
    "Propagate",
    "Propagation",
    "Step",
    "Traffic",
    "bytes_sent",
    "cost",
    "factorize",
    "plan",
    "step_cost",
    "steps_bytes",
    "traffic",
]
