"""Whether the error for a mistake names the op that is wrong, or the first one that uses its value.

A mistake changes ops of a program: one that is left out, done twice, or has other operands or attributes; or their
order, or outputs. An error names the ops that it prints, by their results, and outputs; one of types names an op by its
name and place. It is

- *exact* if it names what was changed;
- *near* if it names an op or an output that uses the value of what was changed, as it is or after ops that only move or
  send elements: such a value may be one of the model, or a term of a sum, until an op needs another;
- *other* otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from distir_relax.ir import Function, Module, Op, inline
from distir_relax.ops import Trait, lookup

EXACT, NEAR, OTHER = "exact", "near", "other"

_PASSES_ON = frozenset({Trait.TRANSFER, Trait.WAIT, Trait.STARTS, Trait.FINISHES, Trait.TRIVIAL})


def naming(right: Module, wrong: Module, message: str) -> str:
    """How the error for a program with a mistake names it; both programs have the same functions."""
    functions = inline(right).functions
    pairs = [(a, b) for a, b in zip(functions, inline(wrong).functions, strict=True) if a != b]
    found = {_naming(before, after, message) for before, after in pairs}
    return next(kind for kind in (EXACT, NEAR, OTHER) if kind in found)


def _naming(before: Function, after: Function, message: str) -> str:
    changed = _changed(before, after)
    named = set(re.findall(r"%([^\s%:,(){}]+)(?:: | is | = )", message)) | set(re.findall(r"output '([^']*)'", message))
    places = {f"{op.location}: {op.name} " for op in after.ops if any(v.name in changed for v in op.results)}
    if changed & named or any(message.startswith(place.removeprefix(": ")) for place in places):
        return EXACT
    return NEAR if (_users(after, changed) | _users(before, changed)) & named else OTHER


def _changed(before: Function, after: Function) -> set[str]:
    """The results of ops that are not the same in both functions, and the names of such outputs.

    Of an op that is left out, these are its results: ops and outputs that take another value for them use it.
    """
    first, second = ({op.results: (op.name, op.operands, op.attrs) for op in f.ops} for f in (before, after))
    left_out = first.keys() - second.keys()
    changed = left_out or {results for results in second if first.get(results) != second[results]}
    names = {value.name for results in changed for value in results}
    if not names:
        pairs = zip(before.ops, after.ops, strict=True)
        names = {value.name for a, b in pairs if a != b for op in (a, b) for value in op.results}
    outputs = {a.name for a, b in zip(before.outputs, after.outputs, strict=True) if a != b}
    return names if left_out else names | outputs


def _users(function: Function, names: Iterable[str]) -> set[str]:
    """The results of the ops that use values, as they are or passed on, and the names of the outputs that they are."""
    passed, users = set(names), set()
    for op in function.ops:
        if any(value.name in passed for value in op.operands):
            results = {value.name for value in op.results}
            users |= results
            if _passes_on(op):
                passed |= results
    return users | {output.name for output in function.outputs if output.value.name in passed}


def _passes_on(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    return entry.semantics.moved is not None or not entry.traits.isdisjoint(_PASSES_ON)
