"""Operands that are views of growing states with their new elements: cached keys and values of attention.

A step of several requests appends the new elements of all of them, and runs the op on the states, in one call
(`Code.cached`). The appends and views are then part of that call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.ir import Attribute, Function, Op, Value, count_uses, producers
from distir_relax.layout import is_symbolic, symbols_within
from distir_relax.lowering.emit.request_rows import rows_of
from distir_relax.ops import Trait, lookup, torch_cached


@dataclass(frozen=True)
class Cache:
    """A growing state as an operand: `new` is appended along `axis`, then comes a view.

    The view is of `shape`, -1 along the tokens, with its dims permuted by `axes`; None for those of the state.
    """

    state: str
    axis: int
    new: Value
    shape: tuple[int, ...] | None
    axes: tuple[int, ...] | None
    replaced: tuple[Op, ...]
    """The append and the ops of the view."""

    @property
    def arguments(self) -> tuple[Attribute, ...]:
        """The arguments of a `kernels.attention.Cache`."""
        return (self.state, self.axis, self.shape, self.axes)


def with_new_elements(op: Op, caches: Sequence[Cache]) -> list[Value]:
    """Return the operands of an op, the new elements of those that are caches."""
    numbers = lookup(op.name, op.location).code.cached_operands if caches else ()
    new = {number: cache.new for number, cache in zip(numbers, caches, strict=True)}
    return [new.get(number, value) for number, value in enumerate(op.operands)]


def cached_operands(
    function: Function, states: Mapping[str, str], growing: Mapping[str, int]
) -> dict[str, tuple[Cache, ...]]:
    """Return the caches of the ops whose operands `Code.cached` all are such, by the first result of the op.

    `states` and `growing` are as for `to_torch_requests`.
    """
    made_by, uses = producers(function), count_uses(function)
    outputs = {output.value.name: output.name for output in function.outputs}
    found: dict[str, tuple[Cache, ...]] = {}
    for op in function.ops:
        code = lookup(op.name, op.location).code
        if op.callee or not code.cached or rows_of(op.operands[0].tensor) != (2, "new"):
            continue
        if not torch_cached(op, [""] * len(op.operands), ()):
            continue
        caches = []
        for number in code.cached_operands:
            chain = _chain(op.operands[number], made_by, uses)
            cache = _cache(chain, growing) if chain else None
            if cache and uses[cache.state] == 1 and outputs.get(chain[0].results[0].name) == states[cache.state]:
                caches.append(cache)
        if len(caches) == len(code.cached_operands):
            found[op.results[0].name] = tuple(caches)
    return found


def _chain(value: Value, made_by: Mapping[str, Op], uses: Mapping[str, int]) -> list[Op]:
    """Return the ops from an append to a value that nothing else uses, the append first; empty if there is none."""
    chain: list[Op] = []
    while (op := made_by.get(value.name)) is not None and not op.callee:
        entry = lookup(op.name, op.location)
        chain.insert(0, op)
        if entry.code.buffered:
            # The next value of the state is an output too.
            return chain if uses[value.name] == 2 else []
        if uses[value.name] > 1 or len(op.operands) != 1 or Trait.MOVES not in entry.traits:
            return []
        value = op.operands[0]
    return []


def _cache(chain: Sequence[Op], growing: Mapping[str, int]) -> Cache | None:
    append, *views = chain
    state, new = append.operands
    axis = growing.get(state.name)
    rows = rows_of(new.tensor)
    if axis is None or append.attrs["axis"] != axis or rows is None or rows[0] != axis:
        return None
    whole = append.results[0].tensor.shape
    shape, axes = whole, tuple(range(len(whole)))
    for number, op in enumerate(views):
        (before,), (after,) = [v.tensor for v in op.operands], [v.tensor for v in op.results]
        if op.attrs.keys() == {"shape"} and number == 0 and before.elements == after.elements:
            shape, axes = after.shape, tuple(range(len(after.shape)))
        elif op.attrs.keys() == {"axes"} and number == len(views) - 1:
            axes = op.attrs["axes"]  # type: ignore[assignment]
        else:
            return None
    tokens = [dim for dim, size in enumerate(shape) if symbols_within((size,))]
    if len(tokens) != 1 or shape[tokens[0]] != whole[axis]:
        return None
    # Only then the reshape keeps the elements of each token together.
    if math.prod(shape[: tokens[0]]) != math.prod(whole[:axis]):
        return None
    sizes = tuple(-1 if dim == tokens[0] else size for dim, size in enumerate(shape))
    if is_symbolic(sizes) or 0 in sizes or len(axes) != 4 or axes[2:] != (tokens[0], 3) or sizes[axes[0]] != 1:
        return None
    is_same = shape == whole, axes == (0, 1, 2, 3)
    return Cache(state.name, axis, new, None if is_same[0] else sizes, None if is_same[1] else axes, tuple(chain))
