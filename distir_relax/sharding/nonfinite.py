"""Compile-time constants that block delaying a reduction: infinities, NaN, and zero divisors.

A sum of 5 and -4 on two devices is 1, and times infinity it is infinite. But if each term is multiplied by infinity and
then summed, the result is NaN. Run-time values are not checked: with those, and where finite terms overflow, a delayed
sum may be NaN or infinite where the model's result is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from distir_relax.ir import Function, Module, Op
from distir_relax.layout import typical_value
from distir_relax.ops import Trait, lookup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NonfiniteValues:
    """Names of values that contain an infinity or NaN, and of those with a zero; `fixed` are all constant values."""

    fixed: frozenset[str] = frozenset()
    infinite: frozenset[str] = frozenset()
    zero: frozenset[str] = frozenset()

    def stop(self, op: Op, group: frozenset[int]) -> bool:
        """Whether the operands in `group`, in which `op` is linear, must be reduced first."""
        others = [(i, v.name) for i, v in enumerate(op.operands) if i not in group]
        divisors = lookup(op.name, op.location).split.divisors
        return any(name in self.infinite or (i in divisors and name in self.zero) for i, name in others)


def find_nonfinite(module: Module, tensors: Mapping[str, torch.Tensor]) -> NonfiniteValues:
    """Find those among the constants of an entry function, by their data; parameters are not inspected."""
    names = {item.value.name for item in module.main.inputs if item.role == "constant"}
    data_of = {name: tensors[name] for name in names if name in tensors and not tensors[name].is_meta}
    return NonfiniteValues(
        frozenset(data_of),
        frozenset(name for name, data in data_of.items() if data.is_floating_point() and not data.isfinite().all()),
        # Masks may be large; nearly all have a zero.
        frozenset(name for name, data in data_of.items() if str(data.dtype) == "torch.bool" or (data == 0).any()),
    )


def propagate_nonfinite(module: Module, entry: NonfiniteValues) -> dict[str, NonfiniteValues]:
    """Propagate the nonfinite inputs of the entry to each function, by name."""
    inputs, results = {module.main.name: entry}, dict[str, NonfiniteValues]()
    worklist = [module.main]
    while worklist:
        function = worklist.pop()
        values = results[function.name] = _propagate(function, inputs[function.name])
        for op in function.ops:
            if op.callee:
                callee = module.function(op.callee)
                inputs_of_call = _callee_inputs(op, callee, values)
                merged = _merge(inputs[callee.name], inputs_of_call) if callee.name in inputs else inputs_of_call
                if inputs.get(callee.name) != merged:
                    inputs[callee.name] = merged
                    worklist.append(callee)
    return results


def _callee_inputs(op: Op, callee: Function, values: NonfiniteValues) -> NonfiniteValues:
    pairs = [(i.value.name, v.name) for i, v in zip(callee.inputs, op.operands, strict=True)]
    sets = (values.fixed, values.infinite, values.zero)
    return NonfiniteValues(*(frozenset(inner for inner, outer in pairs if outer in names) for names in sets))


def _merge(a: NonfiniteValues, b: NonfiniteValues) -> NonfiniteValues:
    """Merge the inputs of several calls of a function."""
    return NonfiniteValues(a.fixed & b.fixed, a.infinite | b.infinite, a.zero | b.zero)


def _propagate(function: Function, inputs: NonfiniteValues) -> NonfiniteValues:
    """Propagate through ops on constant values only: they move and cast constants, and compute masks of them.

    A comparison or a difference may give zeros; a product of finite constants is assumed to be finite.
    """
    fixed, infinite, zero = set(inputs.fixed), set(inputs.infinite), set(inputs.zero)
    for op in function.ops:
        results = [v.name for v in op.results]
        if Trait.SCALAR in lookup(op.name, op.location).traits:
            number = float(typical_value(cast(int, op.attrs["value"])))
            fixed.update(results)
            infinite.update(results if not math.isfinite(number) else ())
            zero.update(results if number == 0 else ())
        elif all(v.name in fixed for v in op.operands):
            fixed.update(results)
            infinite.update(results if any(v.name in infinite for v in op.operands) else ())
            is_computed = len(op.operands) != 1 and Trait.MOVES not in lookup(op.name, op.location).traits
            zero.update(results if is_computed or any(v.name in zero for v in op.operands) else ())
    return NonfiniteValues(frozenset(fixed), frozenset(infinite), frozenset(zero))
