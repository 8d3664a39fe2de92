"""Search on the ranks of a launch: the first rank distributes candidates, the others simulate them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.grid_search import OutcomeCallback, Search, begin_worker, search_grid
from distir_relax.strategy_search.local_search import search_locally
from distir_relax.strategy_search.search_space import Space


def search_on_ranks(
    source: Source,
    profile: Profile,
    space: Space,
    resume: str | Path | None = None,
    on_outcome: OutcomeCallback | None = None,
    draw: Draw | None = None,
    by_steps: bool = False,
) -> Search:
    """Run `search_grid`, or `search_locally`, on all ranks of mpirun, each of which calls this; all return the result.

    `on_outcome` and `resume` apply to the first rank. Raises as `search_grid` does, on all ranks.
    """
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    world = MPI.COMM_WORLD
    evaluator = Evaluator(source, profile, () if by_steps else space.candidates(), draw)
    begin_worker(evaluator)
    result: Search | DistIRError | None = None
    with MPICommExecutor(world, root=0) as executor:
        if executor is not None:
            single = world.size == 1
            try:
                result = (search_locally if by_steps else search_grid)(
                    source, profile, space, resume=resume, on_outcome=on_outcome, workers=1 if single else None,
                    draw=draw, executor=None if single else executor,  # type: ignore[arg-type]
                )  # fmt: skip
            except DistIRError as error:
                result = error
    message = replace(result, evaluator=None) if isinstance(result, Search) else result
    shared: Search | DistIRError = world.bcast(message, root=0)
    if isinstance(shared, DistIRError):
        raise shared
    return replace(shared, evaluator=evaluator)
