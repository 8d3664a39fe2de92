"""The best strategy, by trying all."""

from distir_relax.planner.evaluate import Evaluator
from distir_relax.planner.grid import Search, search_grid
from distir_relax.planner.least import RULED_OUT
from distir_relax.planner.outcome import Outcome
from distir_relax.planner.ranks import search_on_ranks
from distir_relax.planner.space import Candidate, Space
from distir_relax.planner.steps import search_by_steps

__all__ = [
    "RULED_OUT",
    "Candidate",
    "Evaluator",
    "Outcome",
    "Search",
    "Space",
    "search_by_steps",
    "search_grid",
    "search_on_ranks",
]
