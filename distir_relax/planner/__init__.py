"""The best strategy for a model on a machine: what there is to try, what each is predicted to do, the best of them."""

from distir_relax.planner.evaluate import Evaluator
from distir_relax.planner.grid import Search, search_grid
from distir_relax.planner.outcome import Outcome
from distir_relax.planner.ranks import search_on_ranks
from distir_relax.planner.space import Candidate, Space

__all__ = ["Candidate", "Evaluator", "Outcome", "Search", "Space", "search_grid", "search_on_ranks"]
