"""Attention to growing states takes them as they are: keys and values that are views of states with new elements.

A step of several requests appends the new elements of all of them, and attends to the states, in one call. The appends
and views are then part of that call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from distir_relax.executable.request_rows import rows_of
from distir_relax.ir import Attribute, Function, Module, Op, Value, count_uses, producers
from distir_relax.layout import is_symbolic, symbols_within
from distir_relax.ops import Appending, Trait, lookup

if TYPE_CHECKING:
    from distir_relax.kernels.attention import View


@dataclass(frozen=True, slots=True)
class AttendStates:
    """Pass: ranked stage, in and out, for a program of one sequence (`OneSequence`).

    `states` maps the inputs that are states to the outputs with their next values.
    """

    takes: ClassVar[tuple[str, ...]] = ("ranked",)
    gives: ClassVar[str] = ""
    states: Mapping[str, str] = field(default_factory=dict)

    def run(self, module: Module) -> Module:
        """Replace attention (`Code.of_states`), the appends of its keys and values, and their views, by one op."""
        return replace(module, functions=tuple(_attending(f, self.states) for f in module.functions))


@dataclass(frozen=True, slots=True)
class _Cache:
    """An operand that is a view of a state with new elements: the chain of ops that makes it, the append first."""

    chain: Sequence[Op]
    view: View

    @property
    def state(self) -> Value:
        return self.chain[0].operands[0]

    @property
    def new(self) -> Value:
        return self.chain[0].operands[1]

    @property
    def whole(self) -> Value:
        return self.chain[0].results[0]


def _attending(function: Function, states: Mapping[str, str]) -> Function:
    made_by, uses = producers(function), count_uses(function)
    outputs = {output.value.name: output.name for output in function.outputs}
    replaced: set[str] = set()
    attending: dict[str, Op] = {}
    for op in function.ops:
        form = None if op.callee else lookup(op.name, op.location).incremental
        if form is None or not form.of_states or op.attrs["causal"] or rows_of(op.operands[0].tensor) != (2, "new"):
            continue
        caches = [_cache(_chain(value, made_by, uses)) for value in op.operands[1:3]]
        found = [cache for cache in caches if cache and cache.state.name in states and uses[cache.state.name] == 1]
        kept = [cache for cache in found if outputs.get(cache.whole.name) == states[cache.state.name]]
        if len(kept) == len(caches):
            attending[op.results[0].name] = _of_states(op, form.of_states, kept)
            replaced |= {v.name for cache in kept for link in cache.chain for v in link.results}
    ops = [attending.get(op.results[0].name, op) if op.results else op for op in function.ops]
    left = [op for op in ops if not op.results or op.results[0].name not in replaced]
    return replace(function, ops=tuple(left))


def _of_states(op: Op, form: str, caches: Sequence[_Cache]) -> Op:
    operands = (op.operands[0], *(c.new for c in caches), *(c.state for c in caches), *op.operands[3:])
    results = (*op.results, *(cache.whole for cache in caches))
    attrs: dict[str, Attribute] = {name: value for name, value in op.attrs.items() if name != "causal"}
    attrs["views"] = tuple(cache.view for cache in caches)
    return replace(op, name=form, operands=operands, results=results, attrs=attrs)


def _chain(value: Value, made_by: Mapping[str, Op], uses: Mapping[str, int]) -> list[Op]:
    """Return the ops from an append to a value that nothing else uses, the append first; empty if there is none."""
    chain: list[Op] = []
    while (op := made_by.get(value.name)) is not None and not op.callee:
        entry = lookup(op.name, op.location)
        chain.insert(0, op)
        if entry.kernel(Appending) is not None:
            # The next value of the state is an output too.
            return chain if uses[value.name] == 2 else []
        if uses[value.name] > 1 or len(op.operands) != 1 or Trait.MOVES not in entry.traits:
            return []
        value = op.operands[0]
    return []


def _cache(chain: Sequence[Op]) -> _Cache | None:
    """Return the cache that a chain of ops is, if its view is (1, heads, tokens, width)."""
    if not chain:
        return None
    append, *views = chain
    axis = append.attrs["axis"]
    assert isinstance(axis, int)
    rows = rows_of(append.operands[1].tensor)
    if rows is None or rows[0] != axis:
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
    return _Cache(chain, (axis, () if shape == whole else sizes, () if axes == (0, 1, 2, 3) else axes))
