"""Weights that a rank on a CPU holds in several forms: as they are, and packed for a product.

A table of embeddings that a classifier shares is read by rows, and packed for the classifier's product.
"""

from __future__ import annotations

from collections import defaultdict

from distir_relax.ir import Function, Module, Op, PlacedType
from distir_relax.ops import Trait, is_packable, lookup

_Forms = dict[str, set[object]]


def weight_copies(module: Module, function: Function) -> dict[str, int]:
    """Return the weights of a function that the torch backend holds in more than one form on a CPU, and the number of
    forms besides the first.

    The forms are those of `pack_linear` and its kind, which is another for another number of rows, and the weight
    itself if anything else reads it. A program that updates weights packs none.
    """
    weights = {item.value.name for item in function.inputs if item.role in ("parameter", "constant")}
    updated = {op.operands[0].name for op in function.ops if not op.callee and lookup(op.name).updates}
    if updated & weights:
        return {}
    forms = _forms(module, function, frozenset(weights), {})
    return {name: len(forms[name]) - 1 for name in sorted(weights) if len(forms.get(name, ())) > 1}


def _forms(
    module: Module, function: Function, weights: frozenset[str], found: dict[tuple[str, frozenset[str]], _Forms]
) -> _Forms:
    """Return the forms in which the values that depend on `weights` alone are needed in each run."""
    key = function.name, weights
    if key in found:
        return found[key]
    fixed = set(weights)
    for op in function.ops:
        if not op.callee and not _is_late(op) and all(v.name in fixed for v in op.operands):
            fixed.update(v.name for v in op.results)
    forms: _Forms = defaultdict(set)
    for output in function.outputs:
        forms[output.value.name].add("whole")
    for op in reversed(function.ops):
        if op.callee:
            callee = module.function(op.callee)
            pairs = [(i.value.name, v.name) for i, v in zip(callee.inputs, op.operands, strict=True)]
            inner = _forms(module, callee, frozenset(name for name, v in pairs if v in fixed), found)
            for name, passed in pairs:
                forms[passed] |= inner.get(name, set())
        elif op.results and op.results[0].name in fixed:
            # It is computed from its operands once.
            for operand in op.operands:
                forms[operand.name] |= set().union(*(forms[v.name] for v in op.results))
        else:
            packed = is_packable(op) and all(v.name in fixed for v in op.operands[1:])
            for number, operand in enumerate(op.operands):
                forms[operand.name].add((op.name, number, _rows(op)) if packed and number else "whole")
    found[key] = forms
    return forms


def _is_late(op: Op) -> bool:
    return Trait.ON_COMMUNICATOR in lookup(op.name, op.location).traits


def _rows(op: Op) -> int:
    kind = op.results[0].type
    local = (kind.local(0) if isinstance(kind, PlacedType) else op.results[0].tensor).typical
    return local.elements // local.shape[-1] if local.elements else 0
