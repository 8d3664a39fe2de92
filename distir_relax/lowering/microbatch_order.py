"""In which order the microbatches of a program are worked through: one after the other, as far as they can."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distir_relax.ir import Op


def one_by_one(
    ops: Sequence[Op], parts: Mapping[str, int], totals: Collection[str], places: Mapping[str, int]
) -> list[Op]:
    """Ops in an order in which what is done for one microbatch comes before the next: as late as it can where all meet.

    By the names of values, `parts` says of which microbatch each is, -1 for what is the same for all, and `places`
    where it stands in the program; `totals` are made of all microbatches. A total that microbatches go on with (how
    many labels there are) is made first, with what it takes, and nothing else is: no forward waits for another.
    """
    after = set(totals)
    """What is the same for all microbatches, and made when they are done."""
    for op in ops:
        if parts[op.results[0].name] < 0 and any(v.name in after for v in op.operands):
            after.update(v.name for v in op.results)
    # How many times microbatches meet behind an op, for one of them to go on with.
    meetings: dict[str, int] = {}
    for op in reversed(ops):
        behind = max(meetings.get(v.name, 0) for v in op.results)
        is_of_one = parts[op.results[0].name] >= 0
        for v in op.operands:
            meetings[v.name] = max(meetings.get(v.name, 0), behind + (is_of_one and v.name in after))
        meetings.update((v.name, behind) for v in op.results)
    turns: dict[str, int] = {}
    for op in ops:
        name = op.results[0].name
        same = [turns.get(v.name, parts[v.name]) for v in op.operands if meetings[v.name] == meetings[name]]
        turns.update((v.name, max([parts[name], *same])) for v in op.results)

    def place(op: Op) -> tuple[int, int, int]:
        name = op.results[0].name
        return -meetings[name], turns[name], places[name]

    return sorted(ops, key=place)
