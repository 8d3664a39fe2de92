"""The best strategy, by trying all."""

from distir_relax.strategy_search.evaluate import Evaluator
from distir_relax.strategy_search.grid_search import Search, search_grid
from distir_relax.strategy_search.local_search import search_by_steps
from distir_relax.strategy_search.lower_bounds import RULED_OUT
from distir_relax.strategy_search.mpi_workers import search_on_ranks
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.search_space import Candidate, Space

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
