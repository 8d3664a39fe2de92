"""Masks and positions as functions of their indices, which models compute in dozens of ops from ranges of numbers.

The mask of a causal language model becomes one op:

    %mask: bool[batch,1,new,new + past] = indexed() {value="i3 <= i2 + past", names=("past",), sizes=(past,), ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, Function, Module, Op, live_ops
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import assuming, size_of
from distir_relax.lowering.ranked.skip_repeats import has_effects
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table import Element, broadcast_element, is_index, is_number, symbols_of_element

_DTYPES = ("bool", "int32", "int64")


@dataclass(frozen=True, slots=True)
class IndexPositions:
    """Pass: ranked stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("ranked",)
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Replace values of every function that are functions of their indices, if more than one op computes them."""
        if any(is_index(symbol) for symbol in module_symbols(module).values()):
            return module
        with assuming(module.guards):
            return replace(module, functions=tuple(map(_with_indexed, module.functions)))


def index_elements(function: Function, known: Mapping[str, Element] | None = None) -> dict[str, Element]:
    """Return an element of each value that is a function of its indices, by name, and of those that are `known`.

    Guards are assumed by the caller.
    """
    elements: dict[str, Element] = dict(known or {})
    for op in function.ops:
        if (found := _element(op, elements)) is not None:
            elements[op.results[0].name] = found
    return elements


def _with_indexed(function: Function) -> Function:
    elements = index_elements(function)
    sources: dict[str, int] = {}
    """The number of ops that compute each value, at least."""
    for op in function.ops:
        if op.results and op.results[0].name in elements:
            sources[op.results[0].name] = 1 + sum(sources[v.name] for v in op.operands)
    used = {v.name for op in function.ops if op.results[0].name not in elements for v in op.operands}
    used |= {output.value.name for output in function.outputs}
    ops = [
        _indexed(op, elements[name]) if (name := op.results[0].name) in used and sources.get(name, 0) > 1 else op
        for op in function.ops
    ]
    changed = replace(function, ops=tuple(ops))
    return function if changed.ops == function.ops else replace(changed, ops=live_ops(changed, has_effects))


def _element(op: Op, known: Mapping[str, Element]) -> Element | None:
    """Return the element of an op's result; None if it is no function of its indices, as far as is known."""
    if op.callee or len(op.results) != 1 or any(v.name not in known for v in op.operands):
        return None
    entry, result = lookup(op.name, op.location), op.results[0].tensor
    if result.dtype not in _DTYPES or not entry.computes:
        return None
    given, shapes = [known[v.name] for v in op.operands], [v.tensor.shape for v in op.operands]
    if Trait.POINTWISE in entry.traits:
        given = [broadcast_element(x, shape, result.shape) for x, shape in zip(given, shapes, strict=True)]
    try:
        if entry.semantics.element is not None:
            return entry.semantics.element(given, shapes, op.attrs, result.shape)
        if entry.semantics.sizes is None or Trait.POINTWISE not in entry.traits:
            return None
        if not all(map(is_number, given)):
            return None
        numbers = entry.semantics.sizes([np.array(x, object) for x in given], op.attrs)
        found: Element = np.asarray(numbers, object).item()
    except (DistIRError, NotImplementedError):  # of sizes whose comparison is open
        return None
    return None if isinstance(found, float) else found


def _indexed(op: Op, element: Element) -> Op:
    """Return the op that computes the result of an op from the indices of its elements."""
    result = op.results[0]
    symbols = sorted((s for s in symbols_of_element(element) if not is_index(s)), key=str)
    attrs: dict[str, Attribute] = {
        "value": str(element), "names": tuple(map(str, symbols)), "sizes": tuple(map(size_of, symbols)),
        "shape": result.tensor.shape, "dtype": result.tensor.dtype,
    }  # fmt: skip
    return Op("indexed", (), op.results, attrs, op.location)
