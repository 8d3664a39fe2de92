"""Rows that lie with their groups: along a mesh axis that divides these, each device works on the rows of its own.

===========  =============================================  =========================================================
op           operands along the axis                        results
===========  =============================================  =========================================================
dispatch     rows ``S[0]`` or ``R``, groups ``S[0]``        ``Routed[0]``: sent, or where all are there, chosen
within       rows ``Routed[0]``, groups' matrices ``S[0]``  ``Routed[0]``; what is of each group ``S[0]``
row by row   ``Routed[0]``, and numbers                     ``Routed[0]``
combine      rows ``Routed[0]``, groups ``S[0]``            ``S[0]``: sent back; or ``I[sum]``: zeros but for own rows
===========  =============================================  =========================================================

The groups of all rows are known to all devices along the axis (`ids` is ``R``): so each knows who sends how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distir_relax.errors import AnnotationError
from distir_relax.ir import Function, Op
from distir_relax.layout import Partial, Placement, R, Routed, Shard
from distir_relax.ops import PARALLEL, Routing, Rule, lookup

Chosen = tuple[list[Placement], list[Placement]]
"""What an op needs of each operand along an axis, and gives as each result."""


def worked_on(function: Function) -> frozenset[str]:
    """The values that some product of groups is made of, by its rows; `function` calls no other."""
    found: set[str] = set()
    for op in reversed(function.ops):
        routing = lookup(op.name, op.location).split.routing
        if routing is Routing.WITHIN or (found and routing is None and any(v.name in found for v in op.results)):
            found.update(v.name for v in op.operands)
    return frozenset(found)


def is_sent(operand: Sequence[Placement], result: Sequence[Placement]) -> bool:
    """Whether rows that lie so before and behind a dispatch, or a combination, are sent between devices."""
    return any(isinstance(a, Shard) and isinstance(b, Routed) for a, b in zip(operand, result, strict=False)) or any(
        isinstance(a, Routed) and isinstance(b, Shard) for a, b in zip(operand, result, strict=False)
    )


def routed(
    op: Op,
    have: Sequence[Placement],
    wish: Placement,
    share: Callable[[int], Placement],
    sendable: Callable[[Placement], bool],
) -> Chosen | None:
    """What `op` needs and gives along an axis, by where rows lie with their groups; None where they do not.

    Its operands lie as they `have`, and its first result is to lie as `wish`. `share` is the part of the groups that
    each device has in an operand or result, by its number; `sendable` says whether rows may be sent between devices
    that have such parts of the groups: these are blocks, and no other axis sends. Raises
    `AnnotationError` for an op that would need all rows.
    """
    routing = lookup(op.name, op.location).split.routing
    lies = [i for i, p in enumerate(have) if isinstance(p, Routed)]
    if routing is None:
        return _row_by_row(op, have, lies) if lies else None
    groups = len(have) - 1
    if not lies and (routing is not Routing.DISPATCH or not isinstance(have[groups], Shard)):
        return None
    part = have[groups] if isinstance(have[groups], Shard) else share(groups)
    if routing is Routing.DISPATCH:
        rows = have[0] if isinstance(have[0], Shard) and have[0].dim == 0 and sendable(part) else R
        return [rows, R, part], [Routed(0)]
    if routing is Routing.COMBINE:
        back = isinstance(wish, Shard) and wish.dim == 0 and sendable(part)
        return [have[0], R, part], [wish if back else Partial("sum")]
    return _within(op, have, lies, share)


def _within(op: Op, have: Sequence[Placement], lies: Sequence[int], share: Callable[[int], Placement]) -> Chosen:
    rule, count = _rule(op), len(op.operands)
    found: list[Placement] = []
    for number, dims in enumerate((*rule.operands, *rule.results)):
        names = [rule.factors[f].name for dim in dims for f in dim]
        if number == count - 2 or (number < count and number not in lies and "group" not in names):
            found.append(R)
        elif "group" in names:
            found.append(share(number))
        else:
            found.append(Routed(0))
    return found[:count], found[count:]


def _row_by_row(op: Op, have: Sequence[Placement], lies: Sequence[int]) -> Chosen:
    rule, split = _rule(op), lookup(op.name, op.location).split
    rows = {rule.operands[i][p.dim] for i, p in enumerate(have) if isinstance(p, Routed)}
    row = next(iter(rows))
    places = [dims.index(row) if row in dims else None for dims in rule.results]
    told = split.positional | split.expand.keys()
    if len(rows) > 1 or len(row) != 1 or None in places or rule.windows:
        raise _needs_all(op)
    if rule.factors[row[0]].kind != PARALLEL or rule.factors[row[0]].name in told:
        raise _needs_all(op)
    return [have[i] if i in lies else R for i in range(len(have))], [Routed(d) for d in places if d is not None]


def _rule(op: Op) -> Rule:
    takes, gives = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return lookup(op.name, op.location).rule_for(takes, op.attrs, gives)


def _needs_all(op: Op) -> AnnotationError:
    return AnnotationError(
        f"{op.name} would need all rows, which lie with the devices that have their experts",
        op.location,
        "split the experts along their hidden dim, or not at all",
    )
