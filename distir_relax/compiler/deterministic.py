"""Options of training steps with the same bits on each number of data-parallel ranks."""

from __future__ import annotations

from distir_relax.compiler.options import CompileOptions
from distir_relax.errors import DistIRError
from distir_relax.ir import Module
from distir_relax.layout import is_symbolic
from distir_relax.strategies.batch_dim import find_batch
from distir_relax.strategies.factor_costs import classes_of
from distir_relax.strategies.strategy import Strategy, as_strategy


def deterministic_options(options: CompileOptions, module: Module, pieces: int) -> CompileOptions:
    """Return the options of a step that cuts its batch into `pieces`: each rank has one of each microbatch.

    Raises `DistIRError` for another distribution than data parallelism, for a number of pieces that the ranks do not
    divide, and for a batch that they do not divide.
    """
    where = f"deterministic={pieces!r}"
    if not isinstance(pieces, int) or pieces < 1:
        raise DistIRError("expected a number of pieces of at least 1", where)
    strategy = Strategy() if options["strategy"] is None else as_strategy(options["strategy"])
    ranks = strategy.data
    if pieces % ranks:
        raise DistIRError(
            f"{ranks} data-parallel ranks do not divide {pieces} pieces", where,
            "use a number of ranks that divides it, or another number of pieces",
        )  # fmt: skip
    ordered = Strategy(ranks, microbatches=pieces // ranks)
    others = [key for key in ("mesh", "shardings") if options[key] is not None]
    if strategy not in (Strategy(ranks), ordered) or others or module.meshes:
        raise DistIRError(
            f"expected a strategy of data parallelism alone, found {others[0] if others else strategy}", where,
            f"strategy={str(Strategy(ranks))!r} on {ranks} ranks",
        )  # fmt: skip
    batch = find_batch(classes_of(module)).size
    if is_symbolic(batch) or batch % pieces:
        raise DistIRError(f"expected a batch of a multiple of {pieces} samples, found {batch}", where)
    return {**options, "strategy": ordered, "outline": False}
