"""Find the partial sums that may pass through linear ops, to be reduced after them.

A gradient is accumulated over microbatches before it is reduced over devices; a product is scaled. The result of a
linear op on partial sums is a partial sum too, if nothing else uses the operands and it is no larger
(`sharding.delay_reductions` does the same without costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from distir_relax.ir import Function, Op, count_uses, producers
from distir_relax.ops import lookup
from distir_relax.sharding.factors import Factoring
from distir_relax.sharding.nonfinite import NonfiniteValues


def linear_groups(op: Op, partial: Set[str], hazards: NonfiniteValues) -> Iterator[frozenset[int]]:
    """Yield the sets of operands of `op`, all in `partial`, that may be partial sums; its result is one then."""
    return (group for group, names in _groups(op, hazards) if names <= partial)


def _groups(op: Op, hazards: NonfiniteValues) -> Iterator[tuple[frozenset[int], frozenset[str]]]:
    """Yield the candidates of `linear_groups`, whatever is partial, with their names."""
    if op.callee or len(op.results) != 1:
        return
    for group in lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs):
        size = sum([op.operands[i].tensor.bytes for i in group])
        names = frozenset([op.operands[i].name for i in group])
        if names and op.results[0].tensor.bytes <= size and not hazards.stop(op, group):
            yield group, names


def deferrable_sums(function: Function, factoring: Factoring, hazards: NonfiniteValues) -> frozenset[str]:
    """Return the values of a function without calls that may be left as partial sums for their only user."""
    uses = count_uses(function)
    users = {v.name: op for op in function.ops for v in op.operands}
    summed = {
        value.name
        for op, atoms in zip(function.ops, factoring.atoms, strict=True)
        for value in op.results
        if any(atom.kind == "sum" for atom in atoms)
    }
    # By result: the sets of operands in which its op is linear.
    linear = {v.name: [names for _, names in _groups(op, hazards)] for op in function.ops for v in op.results}
    producer_of = producers(function)
    partial = {name for name in producer_of if uses[name] == 1 and name in users}

    def is_valid(name: str) -> bool:
        has_source = name in summed or any(names <= partial for names in linear[name])
        results = users[name].results
        return has_source and bool(results) and any(name in names <= partial for names in linear[results[0].name])

    worklist = set(partial)
    while worklist:
        name = worklist.pop()
        if name in partial and not is_valid(name):
            partial.discard(name)
            neighbors = (*producer_of[name].operands, *users[name].operands, *users[name].results)
            worklist.update(v.name for v in neighbors if v.name in partial)
    return frozenset(partial)
