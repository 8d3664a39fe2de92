"""Order of ops by microbatch: one microbatch after the other, as far as dependences allow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distir_relax.ir import Op


def order_microbatches(
    ops: Sequence[Op], microbatch_of: Mapping[str, int], totals: Collection[str], position_of: Mapping[str, int]
) -> list[Op]:
    """Sort ops so that those of one microbatch precede the next; sums over microbatches are as late as possible.

    By value names, `microbatch_of` is the microbatch of each, -1 if common to all; `position_of` is the position in
    the program; `totals` are sums over all microbatches. If microbatches depend on a total (the number of labels), it
    is a barrier: it comes first, with what it depends on and nothing else, so that no other forward is delayed by it.
    """
    shared = set(totals)
    """Results common to all microbatches, after their end."""
    for op in ops:
        if microbatch_of[op.results[0].name] < 0 and any(v.name in shared for v in op.operands):
            shared.update(v.name for v in op.results)
    # The number of barriers after each op that some microbatch waits for.
    barriers: dict[str, int] = {}
    for op in reversed(ops):
        later = max(barriers.get(v.name, 0) for v in op.results)
        is_single = microbatch_of[op.results[0].name] >= 0
        for v in op.operands:
            barriers[v.name] = max(barriers.get(v.name, 0), later + (is_single and v.name in shared))
        barriers.update((v.name, later) for v in op.results)
    turn_of: dict[str, int] = {}
    for op in ops:
        name = op.results[0].name
        turns = [turn_of.get(v.name, microbatch_of[v.name]) for v in op.operands if barriers[v.name] == barriers[name]]
        turn_of.update((v.name, max([microbatch_of[name], *turns])) for v in op.results)

    def key(op: Op) -> tuple[int, int, int]:
        name = op.results[0].name
        return -barriers[name], turn_of[name], position_of[name]

    return sorted(ops, key=key)
