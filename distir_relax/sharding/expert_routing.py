"""Placements of rows that are routed to the devices of their groups (experts), along an axis that splits the groups.

===========  =============================================  =========================================================
op           operands along the axis                        results
===========  =============================================  =========================================================
dispatch     rows ``S[0]`` or ``R``, groups ``S[0]``        ``Routed[0]``: sent, or if replicated, selected
within       rows ``Routed[0]``, groups' matrices ``S[0]``  ``Routed[0]``; per-group results ``S[0]``
row by row   ``Routed[0]``, and numbers                     ``Routed[0]``
combine      rows ``Routed[0]``, groups ``S[0]``            ``S[0]``: sent back; or ``I[sum]``: other rows are zero
===========  =============================================  =========================================================

All devices along the axis know the groups of all rows (`ids` is ``R``), and so the row counts of every send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distir_relax.errors import AnnotationError
from distir_relax.ir import Function, Op
from distir_relax.layout import Partial, Placement, R, Routed, Shard
from distir_relax.ops import PARALLEL, Routing, Rule, lookup

Chosen = tuple[list[Placement], list[Placement]]
"""Placements of an op's operands and of its results along an axis."""


def grouped_operands(function: Function) -> frozenset[str]:
    """Return the values that a grouped product depends on row by row; `function` must have no calls."""
    values: set[str] = set()
    for op in reversed(function.ops):
        routing = lookup(op.name, op.location).split.routing
        if routing is Routing.WITHIN or (values and routing is None and any(v.name in values for v in op.results)):
            values.update(v.name for v in op.operands)
    return frozenset(values)


def is_exchanged(operand: Sequence[Placement], result: Sequence[Placement]) -> bool:
    """Whether rows are sent between devices by a dispatch or combine with these placements."""
    return any(isinstance(a, Shard) and isinstance(b, Routed) for a, b in zip(operand, result, strict=False)) or any(
        isinstance(a, Routed) and isinstance(b, Shard) for a, b in zip(operand, result, strict=False)
    )


def routed_placements(
    op: Op,
    have: Sequence[Placement],
    target: Placement,
    shard_of: Callable[[int], Placement],
    sendable: Callable[[Placement], bool],
) -> Chosen | None:
    """Return the placements of `op` along an axis where rows are routed to their groups; None if they are not.

    `have` are the current placements of its operands, `target` is the requested one of its first result. `shard_of`
    returns the group shard of an operand or result, by number; `sendable` tells whether rows may be sent between
    devices with such group shards: these are blocks, and no other axis sends. Raises `AnnotationError` for an op that
    needs all rows.
    """
    routing = lookup(op.name, op.location).split.routing
    routed = [i for i, p in enumerate(have) if isinstance(p, Routed)]
    if routing is None:
        return _row_by_row(op, have, routed) if routed else None
    groups = len(have) - 1
    if not routed and (routing is not Routing.DISPATCH or not isinstance(have[groups], Shard)):
        return None
    group_shard = have[groups] if isinstance(have[groups], Shard) else shard_of(groups)
    if routing is Routing.DISPATCH:
        rows = have[0] if isinstance(have[0], Shard) and have[0].dim == 0 and sendable(group_shard) else R
        return [rows, R, group_shard], [Routed(0)]
    if routing is Routing.COMBINE:
        back = isinstance(target, Shard) and target.dim == 0 and sendable(group_shard)
        return [have[0], R, group_shard], [target if back else Partial("sum")]
    return _grouped(op, have, routed, shard_of)


def _grouped(op: Op, have: Sequence[Placement], routed: Sequence[int], shard_of: Callable[[int], Placement]) -> Chosen:
    rule, count = _rule(op), len(op.operands)
    placements: list[Placement] = []
    for number, dims in enumerate((*rule.operands, *rule.results)):
        factor_names = [rule.factors[f].name for dim in dims for f in dim]
        if number == count - 2 or (number < count and number not in routed and "group" not in factor_names):
            placements.append(R)
        elif "group" in factor_names:
            placements.append(shard_of(number))
        else:
            placements.append(Routed(0))
    return placements[:count], placements[count:]


def _row_by_row(op: Op, have: Sequence[Placement], routed: Sequence[int]) -> Chosen:
    rule, split = _rule(op), lookup(op.name, op.location).split
    rows = {rule.operands[i][p.dim] for i, p in enumerate(have) if isinstance(p, Routed)}
    row = next(iter(rows))
    result_dims = [dims.index(row) if row in dims else None for dims in rule.results]
    variant = split.positional | split.expand.keys()
    if len(rows) > 1 or len(row) != 1 or None in result_dims or rule.windows:
        raise _error(op)
    if rule.factors[row[0]].kind != PARALLEL or rule.factors[row[0]].name in variant:
        raise _error(op)
    return [have[i] if i in routed else R for i in range(len(have))], [Routed(d) for d in result_dims if d is not None]


def _rule(op: Op) -> Rule:
    takes, gives = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return lookup(op.name, op.location).rule_for(takes, op.attrs, gives)


def _error(op: Op) -> AnnotationError:
    return AnnotationError(
        f"{op.name} needs all rows, which are routed to the devices of their experts",
        op.location,
        "split the experts along their hidden dim, or not at all",
    )
