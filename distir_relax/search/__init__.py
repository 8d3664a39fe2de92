"""The best strategy for a model on a machine: what there is to try, what each is predicted to do, the best of them."""

from distir_relax.search.evaluate import Evaluator
from distir_relax.search.grid import Search, search_grid
from distir_relax.search.outcome import Outcome
from distir_relax.search.ranks import search_on_ranks
from distir_relax.search.space import Candidate, Space

__all__ = ["Candidate", "Evaluator", "Outcome", "Search", "Space", "search_grid", "search_on_ranks"]
