"""A search by the ranks of a launch: the first one hands out candidates, the others simulate them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.grid_search import Search, Told, begin_worker, search_grid
from distir_relax.strategy_search.search_space import Space


def search_on_ranks(
    source: Source,
    profile: Profile,
    space: Space,
    resume: str | Path | None = None,
    told: Told | None = None,
    draw: Draw | None = None,
) -> Search:
    """As `search_grid`, by all ranks of mpirun, each of which calls this; all return what was found.

    `told` and `resume` are the first rank's. Raises as `search_grid` does, on all ranks.
    """
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    world = MPI.COMM_WORLD
    evaluator = Evaluator(source, profile, space.candidates(), draw)
    begin_worker(evaluator)
    found: Search | DistIRError | None = None
    with MPICommExecutor(world, root=0) as executor:
        if executor is not None:
            alone = world.size == 1
            try:
                found = search_grid(
                    source, profile, space, resume=resume, told=told, workers=1 if alone else None, draw=draw,
                    executor=None if alone else executor,  # type: ignore[arg-type]
                )  # fmt: skip
            except DistIRError as error:
                found = error
    sent = replace(found, evaluator=None) if isinstance(found, Search) else found
    shared: Search | DistIRError = world.bcast(sent, root=0)
    if isinstance(shared, DistIRError):
        raise shared
    return replace(shared, evaluator=evaluator)
