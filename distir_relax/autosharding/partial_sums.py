"""Which sums may be left pending, on their way through ops that are linear in them, to be made once behind those.

A gradient is summed over microbatches before it is reduced over devices; a product is scaled. What is computed of a
pending sum is one too, where nothing else uses it and it is no larger (`sharding.reductions` does the like without
looking at costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from distir_relax.ir import Function, Op, count_uses, makers
from distir_relax.ops import lookup
from distir_relax.sharding.factors import Factoring
from distir_relax.sharding.nonfinite import Hazards


def linear_groups(op: Op, pending: Set[str], hazards: Hazards) -> Iterator[frozenset[int]]:
    """The sets of operands of `op`, all of them in `pending`, that may be sums not yet made; then so is its result."""
    return (group for group, names in _groups(op, hazards) if names <= pending)


def _groups(op: Op, hazards: Hazards) -> Iterator[tuple[frozenset[int], frozenset[str]]]:
    """The sets of operands of `linear_groups` where anything may be pending, with their names."""
    if op.callee or len(op.results) != 1:
        return
    for group in lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs):
        size = sum([op.operands[i].tensor.bytes for i in group])
        names = frozenset([op.operands[i].name for i in group])
        if names and op.results[0].tensor.bytes <= size and not hazards.stop(op, group):
            yield group, names


def may_pend(function: Function, factoring: Factoring, hazards: Hazards) -> frozenset[str]:
    """The values of a function without calls that may be left with a sum pending for the one op that uses them."""
    uses = count_uses(function)
    users = {v.name: op for op in function.ops for v in op.operands}
    summed = {
        value.name
        for op, atoms in zip(function.ops, factoring.atoms, strict=True)
        for value in op.results
        if any(atom.kind == "sum" for atom in atoms)
    }
    # Which sets of operands an op is linear in, by a result of it.
    linear = {v.name: [names for _, names in _groups(op, hazards)] for op in function.ops for v in op.results}
    made = makers(function)
    found = {name for name in made if uses[name] == 1 and name in users}

    def holds(name: str) -> bool:
        given = name in summed or any(names <= found for names in linear[name])
        results = users[name].results
        return given and bool(results) and any(name in names <= found for names in linear[results[0].name])

    waiting = set(found)
    while waiting:
        name = waiting.pop()
        if name in found and not holds(name):
            found.discard(name)
            around = (*made[name].operands, *users[name].operands, *users[name].results)
            waiting.update(v.name for v in around if v.name in found)
    return frozenset(found)
