"""Search for the fastest strategy."""

from distir_relax.strategy_search.evaluate import Evaluator
from distir_relax.strategy_search.grid_search import Search, search_grid
from distir_relax.strategy_search.local_search import search_locally
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
    "search_grid",
    "search_locally",
    "search_on_ranks",
]
