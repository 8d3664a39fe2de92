"""When memory is free, and which results are written into memory that is: attributes of ops (`ir.MEMORY`).

The caller of a function may need its arguments, and every call needs its constants: these are never overwritten. Where
weights are prepared, each is free after its last use, so that a packed weight is in memory only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.executable.hoist import PREPARE, SIZES, numbers_of
from distir_relax.ir import EACH, Attribute, Function, Module, Op, Value
from distir_relax.ops import Appending, lookup, plain_values, reused_operands

# Values with larger storage are freed after their last use; for smaller ones the line of code is not worth it.
_LARGE = 1 << 11


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Pass: executable stage, in and out.

    With `of_weights` only the memory of weights that are prepared is planned.
    In a step of several `requests` no memory is written again: values are views of those of others. Every value is
    freed after its last use, but in functions for each request, which are short. There the next value of a state that
    grows along a dim (`growing`) is written into the state's buffer, if nothing else reads the state. `states` maps the
    inputs that are states to the outputs with their next values.
    """

    takes: ClassVar[tuple[str, ...]] = ("executable",)
    gives: ClassVar[str] = ""
    of_weights: bool = False
    requests: bool = False
    states: Mapping[str, str] = field(default_factory=dict)
    growing: Mapping[str, int] = field(default_factory=dict)

    def run(self, module: Module) -> Module:
        """Add the attributes to every function, but to those of sizes, whose values are small or kept."""
        functions = {f.name: f for f in module.functions}
        stores, planned = self._stores(module) if self.requests else {}, []
        for function in module.functions:
            is_main = self.requests and function is module.main
            if function.name.endswith(PREPARE) or is_main:
                planned.append(_with_last_uses(function, is_main))
            elif function.name in stores:
                planned.append(_appending(function, stores[function.name], self.growing))
            elif self.requests or self.of_weights or function.name.endswith(SIZES):
                planned.append(function)
            else:
                planned.append(_planned(function, functions))
        return replace(module, functions=tuple(planned))

    def _stores(self, module: Module) -> dict[str, dict[str, Value]]:
        """Return, for functions that are called for each request, the next value of each growing state."""
        by_output = {output: state for state, output in self.states.items() if state in self.growing}
        kept = {o.value.name: by_output[o.name] for o in module.main.outputs if o.name in by_output}
        return {
            op.callee: {
                kept[result.name]: output.value
                for result, output in zip(op.results, module.function(op.callee).outputs, strict=True)
                if result.name in kept
            }
            for op in module.main.ops if op.callee
        }  # fmt: skip


def _appending(function: Function, stores: Mapping[str, Value], growing: Mapping[str, int]) -> Function:
    """Return a function that appends the new elements of growing states to their buffers."""
    reads = Counter(v.name for op in function.ops for v in op.operands)
    ops = []
    for op in function.ops:
        state = op.operands[0].name if op.operands else ""
        can_append = state in stores and lookup(op.name, op.location).kernel(Appending) is not None
        is_next = can_append and stores[state] == op.results[0] and op.attrs["axis"] == growing[state]
        ops.append(_with_memory(op, into=0) if is_next and reads[state] == 1 else op)
    return replace(function, ops=tuple(ops))


def _with_last_uses(function: Function, keeps_inputs: bool) -> Function:
    """Return a function that frees every value after its last use.

    One that `keeps_inputs` frees arguments with the rows of all requests alone.
    """
    kept = {output.value.name for output in function.outputs} | numbers_of(function).keys()
    if keeps_inputs:
        kept |= {i.value.name for i in function.inputs if i.role != "input" or i.value.tensor.form == EACH}
    last = {v.name: number for number, op in enumerate(function.ops) for v in op.operands}
    ops = [
        _with_memory(op, last=_places(op, {n for n in _names(op) if last[n] == number} - kept))
        for number, op in enumerate(function.ops)
    ]
    return replace(function, ops=tuple(ops))


def _planned(function: Function, functions: Mapping[str, Function]) -> Function:
    last = {v.name: number for number, op in enumerate(function.ops) for v in op.operands}
    kept = {item.value.name for item in function.inputs if item.role != "input"}
    kept |= {output.value.name for output in function.outputs}
    numbers = numbers_of(function)
    large = _large_storage(function) - kept
    reused = reused_operands(function, numbers, _reordered(function, functions))
    ops = []
    for number, op in enumerate(function.ops):
        if not op.results or op.results[0].name in numbers:
            ops.append(op)
            continue
        dead = {name for name in _names(op) if last[name] == number and name in large}
        unused = tuple(n for n, v in enumerate(op.results) if v.name not in last and v.name in large)
        into = reused.get(op.results[0].name)
        ops.append(_with_memory(op, into=into, last=_places(op, dead), unused=unused))
    return replace(function, ops=tuple(ops))


def _names(op: Op) -> Collection[str]:
    return [value.name for value in op.operands]


def _places(op: Op, names: Collection[str]) -> tuple[int, ...]:
    """Return which operands have these names, the first of each."""
    found = {value.name: number for number, value in reversed([*enumerate(op.operands)])}
    return tuple(sorted(found[name] for name in names))


def _with_memory(op: Op, **memory: Attribute) -> Op:
    added = {key: value for key, value in memory.items() if value not in (None, ())}
    return replace(op, attrs={**op.attrs, **added}) if added else op


def _reordered(function: Function, functions: Mapping[str, Function]) -> set[str]:
    """Return the inputs, computed once, that are not in memory in the order of their dims."""
    found: set[str] = set()
    for end in (PREPARE, SIZES):
        if (source := functions.get(function.name + end)) is not None:
            plain = plain_values(source, found)
            found |= {output.value.name for output in source.outputs if output.value.name not in plain}
    return found


def _large_storage(function: Function) -> set[str]:
    """Return the values with storage larger than `_LARGE`: a small view keeps its whole base alive."""
    large = {item.value.name for item in function.inputs if item.value.tensor.bytes > _LARGE}
    for op in function.ops:
        is_view = not op.callee and bool(op.operands) and lookup(op.name, op.location).shares_storage
        if is_view and op.operands[0].name in large:
            large.update(v.name for v in op.results)
        large.update(v.name for v in op.results if v.tensor.bytes > _LARGE)
    return large
