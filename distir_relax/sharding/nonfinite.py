"""Numbers known at compile time that a sum must not meet while it is pending: infinities, NaN, zeros that divide.

A sum of 5 and -4 on two devices is 1, and times infinity it is infinite. Each part times infinity, and then summed, is
NaN. What comes in when a program runs cannot be known: there, and where finite parts overflow, a delayed sum may give
NaN or infinity where the model gives another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from distir_relax.ir import Function, Module, Op
from distir_relax.ops import Trait, lookup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Hazards:
    """The names of values that hold an infinity or NaN, and of those that hold a zero; `fixed` are all known ones."""

    fixed: frozenset[str] = frozenset()
    infinite: frozenset[str] = frozenset()
    zero: frozenset[str] = frozenset()

    def stop(self, op: Op, group: frozenset[int]) -> bool:
        """Whether `op` must have the operands in `group`, in which it is linear, reduced."""
        others = [(i, v.name) for i, v in enumerate(op.operands) if i not in group]
        divisors = lookup(op.name, op.location).split.divisors
        return any(name in self.infinite or (i in divisors and name in self.zero) for i, name in others)


def hazards_in(module: Module, tensors: Mapping[str, torch.Tensor]) -> Hazards:
    """Those among the constants of an entry function, by their data; parameters are not looked at."""
    names = {item.value.name for item in module.main.inputs if item.role == "constant"}
    known = {name: tensors[name] for name in names if name in tensors and not tensors[name].is_meta}
    return Hazards(
        frozenset(known),
        frozenset(name for name, data in known.items() if not bool(data.isfinite().all())),
        frozenset(name for name, data in known.items() if bool((data == 0).any())),
    )


def spread(module: Module, given: Hazards) -> dict[str, Hazards]:
    """What is known in each function, by its name, where `given` is what is known of the entry's inputs."""
    inputs, found = {module.main.name: given}, dict[str, Hazards]()
    waiting = [module.main]
    while waiting:
        function = waiting.pop()
        known = found[function.name] = _follow(function, inputs[function.name])
        for op in function.ops:
            if op.callee:
                callee = module.function(op.callee)
                called = _called(op, callee, known)
                joined = _join(inputs[callee.name], called) if callee.name in inputs else called
                if inputs.get(callee.name) != joined:
                    inputs[callee.name] = joined
                    waiting.append(callee)
    return found


def _called(op: Op, callee: Function, known: Hazards) -> Hazards:
    pairs = [(i.value.name, v.name) for i, v in zip(callee.inputs, op.operands, strict=True)]
    sets = (known.fixed, known.infinite, known.zero)
    return Hazards(*(frozenset(inner for inner, outer in pairs if outer in names) for names in sets))


def _join(a: Hazards, b: Hazards) -> Hazards:
    """Of several calls of one function: what any of them brings in counts."""
    return Hazards(a.fixed & b.fixed, a.infinite | b.infinite, a.zero | b.zero)


def _follow(function: Function, given: Hazards) -> Hazards:
    """Through ops on known values alone: they reshape and mark constants, and write numbers."""
    fixed, infinite, zero = set(given.fixed), set(given.infinite), set(given.zero)
    for op in function.ops:
        results = [v.name for v in op.results]
        if Trait.SCALAR in lookup(op.name, op.location).traits:
            number = float(cast(float, op.attrs["value"]))
            fixed.update(results)
            infinite.update(results if not math.isfinite(number) else ())
            zero.update(results if number == 0 else ())
        elif op.operands and all(v.name in fixed for v in op.operands):
            fixed.update(results)
            infinite.update(results if any(v.name in infinite for v in op.operands) else ())
            zero.update(results if any(v.name in zero for v in op.operands) else ())
    return Hazards(frozenset(fixed), frozenset(infinite), frozenset(zero))
