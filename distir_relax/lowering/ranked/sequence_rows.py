"""Whether a rank's program computes each sequence of a batch from that sequence alone, as it would in a batch of one.

Values have the sequences along one dim, alone or joined with others, such as ``batch*new``. An op keeps sequences apart
if its factor rule says that it is parallel along them. Nothing else may depend on the size of the batch. Masks and
positions are functions of their indices (`index_elements`), which must not name the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from distir_relax.ir import Function, Module, Op, TensorType, inline
from distir_relax.layout import Symbol, assuming, generic_value, size_of, symbols_within
from distir_relax.lowering.ranked.index_positions import index_elements
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table import symbols_of_element
from distir_relax.ops.table.entry import NO_SPLIT
from distir_relax.ops.table.index_expression import index_of
from distir_relax.ops.table.rule import PARALLEL, Rule

_Place: TypeAlias = tuple[int, int] | None
"""The dim with the sequences, and the number of elements of each within that dim; None for a value without them.

Numbers stand for sizes as those of `Rule` do (`generic_value`).
"""


def are_sequences_independent(module: Module, batch: Symbol, entries: Collection[str]) -> bool:
    """Return whether the functions `entries` of a ranked module compute each sequence alone; `batch` is their number.

    False where it cannot be shown.
    """
    module = inline(module)
    with assuming(module.guards):
        functions = [function for function in module.functions if function.name in entries]
        analysis = _Analysis(batch)
        return all(map(analysis.is_independent, functions))


@dataclass(slots=True)
class _Analysis:
    batch: Symbol
    parallel: dict[object, list[_Place] | None] = field(default_factory=dict)
    """The result of `_places` for ops that differ in names only, as those of layers do."""

    def is_independent(self, function: Function) -> bool:
        """Return whether no output depends on other sequences or on their number."""
        elements = index_elements(function)
        places: dict[str, _Place] = {}
        for item in function.inputs:
            if item.role == "input" or not self._depends(item.value.tensor.shape):
                self._add(places, item.value.name, item.value.tensor)
        for op in function.ops:
            first = op.results[0].name if op.results else ""
            if first in elements:
                kind = op.results[0].tensor
                symbols = symbols_of_element(elements[first])
                along = {index_of(dim) for dim, size in enumerate(kind.shape) if self._depends((size,))}
                if self.batch not in symbols and along.isdisjoint(map(size_of, symbols)):
                    self._add(places, first, kind)
                continue
            found = self._remembered(op, [places[v.name] for v in op.operands]) if _all_in(op, places) else None
            if found is not None:
                places |= zip((v.name for v in op.results), found, strict=True)
            elif Trait.COMMUNICATES in lookup(op.name, op.location).traits:
                return False  # the rank that receives it takes it for independent
        return all(output.value.name in places for output in function.outputs)

    def _remembered(self, op: Op, operands: Sequence[_Place]) -> list[_Place] | None:
        kinds = tuple(v.type for v in (*op.operands, *op.results))
        key = (op.name, kinds, tuple(operands), tuple(op.attrs.items()))
        if key not in self.parallel:
            self.parallel[key] = self._places(op, operands)
        return self.parallel[key]

    def _places(self, op: Op, operands: Sequence[_Place]) -> list[_Place] | None:
        """Return the places of an op's results; None if it may mix sequences, or depends on their number."""
        entry, results = lookup(op.name, op.location), [v.tensor for v in op.results]
        shapes = {v.tensor.shape for v in (*op.operands, *op.results)}
        if any(self._depends(value) and value not in shapes for value in op.attrs.values()):
            return None
        if all(0 in kind.shape for kind in results):
            return [self._of(kind) for kind in results]
        if Trait.ON_COMMUNICATOR in entry.traits or (entry.split is NO_SPLIT and entry.semantics.moved is not None):
            return self._moved(results, operands)
        if not any(self._depends(kind.shape) for kind in results):
            return None if any(operands) else [None] * len(results)
        try:
            rule = entry.rule_for([v.tensor for v in op.operands], op.attrs, results)
        except (NotImplementedError, ValueError):  # a rank's program may have operands that no rule is for
            return None
        variant = entry.split.positional | entry.split.expand.keys()
        joined = zip(rule.operands, operands, strict=True)
        factors = {self._factor(rule, dims[p[0]], p[1]) for dims, p in joined if p is not None}
        if not factors:
            created = [self._of(kind) for kind in results]
            dims = [(dims[p[0]], p[1]) for dims, p in zip(rule.results, created, strict=True) if p is not None]
            factors = {self._factor(rule, *each) for each in dims}
        if len(factors) != 1 or (found := next(iter(factors))) is None:
            return None
        factor, inner = found
        if rule.factors[factor].kind != PARALLEL or rule.factors[factor].name in variant:
            return None
        if any(p is None and factor in sum(dims, ()) for dims, p in zip(rule.operands, operands, strict=True)):
            return None
        windowed = {w.result_dim for w in rule.windows}
        places: list[_Place] = []
        for kind, of_dims in zip(results, rule.results, strict=True):
            at = [dim for dim, of_dim in enumerate(of_dims) if factor in of_dim]
            along = [dim for dim, size in enumerate(kind.shape) if self._depends((size,))]
            if len(at) != 1 or at != along or at[0] in windowed:
                return None
            after = of_dims[at[0]][of_dims[at[0]].index(factor) + 1 :]
            places.append((at[0], inner * math.prod(rule.factors[f].size for f in after)))
        return places

    def _moved(self, results: Sequence[TensorType], operands: Sequence[_Place]) -> list[_Place] | None:
        """Return the places of results of an op that moves parts of a value along dims of other sizes.

        A value that is received has its own place, if the batch is a dim of its own.
        """
        found = [self._of(kind) for kind in results]
        if len(operands) == 1:
            return [*operands] * len(results) if all(_dim(p) == _dim(operands[0]) for p in found) else None
        along = [kind.shape[p[0]] for kind, p in zip(results, found, strict=True) if p is not None]
        is_plain = all(size == size_of(self.batch) for size in along)
        return found if not operands and is_plain else None

    def _factor(self, rule: Rule, factors: Sequence[int], inner: int) -> tuple[int, int] | None:
        """Return the factor of a dim that has the sequences, and the number of elements of each within that factor."""
        for factor in reversed(factors):
            size = rule.factors[factor].size
            if size % (inner * generic_value(size_of(self.batch))) == 0:
                return factor, inner
            if inner % size:
                return None
            inner //= size
        return None

    def _add(self, places: dict[str, _Place], name: str, kind: TensorType) -> None:
        """Add an input, or a value that is the same for all sequences."""
        place = self._of(kind)
        if place is not None or not self._depends(kind.shape):
            places[name] = place

    def _of(self, kind: TensorType) -> _Place:
        """Return the place of a value whose only dim that depends on the batch has all of a sequence in a row."""
        along = [dim for dim, size in enumerate(kind.shape) if self._depends((size,))]
        if len(along) != 1:
            return None
        count = generic_value(size_of(self.batch))
        inner, rest = divmod(generic_value(kind.shape[along[0]]), count)
        return None if rest or inner % count == 0 else (along[0], inner)

    def _depends(self, item: object) -> bool:
        return self.batch in symbols_within((item,))


def _all_in(op: Op, places: Collection[str]) -> bool:
    return all(v.name in places for v in op.operands)


def _dim(place: _Place) -> int | None:
    return None if place is None else place[0]
