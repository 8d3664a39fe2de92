"""Counterexamples: the smallest input on which a plan computes another result than its model."""

from distir_relax.counterexample.result import Counterexample, Element
from distir_relax.counterexample.search import Stages, find_counterexample

__all__ = ["Counterexample", "Element", "Stages", "find_counterexample"]
