"""Masks of attention as bounds: the first key of each row, and the one after the last.

A causal mask, and that of a sliding window, need two numbers for each row, where a tensor has one for each key:

    %mask: bool[new, new + past] = indexed() {value="i1 <= i0 + past", ...}
    %mask.bounds: i64[new, 2] = indexed() {value="i1 * (i0 + past + 1)", ...}

Of packed documents, whose numbers are a running sum of their first positions, the first key of a row is that of its
document, in each sample: the last nonzero term up to the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from distir_relax.ir import (
    Attribute,
    Function,
    Module,
    Op,
    TensorType,
    Value,
    fresh_name,
    live_ops,
    producers,
    value_names,
)
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import Symbol, assuming, is_symbolic, size_of, symbols_within
from distir_relax.layout.symbolic_size import Size, SymbolicSize
from distir_relax.lowering.ranked.index_positions import index_elements
from distir_relax.lowering.ranked.skip_repeats import has_effects
from distir_relax.ops import lookup
from distir_relax.ops.table import Element, is_index
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.index_expression import Condition, all_of, compared, index_of, reindexed, reindexed_number

_UNKNOWN = "_unknown_"
"""The names of the sizes of `_unknown` functions begin so."""


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """Pass: global or ranked stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("global", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Give attention (`Code.mask`) the bounds of its masks, where those are functions of positions alone.

        In the global stage a causal mask that is no operand becomes bounds, too.
        """
        return bounded_module(module, {})


def bounded_module(module: Module, known: Mapping[str, Element]) -> Module:
    """Return `BoundAttention` of a module, with elements of inputs of its entry function that are `known`."""
    if any(is_index(symbol) for symbol in module_symbols(module).values()):
        return module
    with assuming(module.guards):
        masks = _Masks(module, known)
        return replace(module, functions=tuple(map(masks.bounded, module.functions)))


@dataclass(slots=True)
class _Masks:
    """The masks of a module that have bounds: values of a function, and inputs of functions that all calls give one."""

    module: Module
    known: Mapping[str, Element]
    bounds: dict[str, dict[str, _Bounds]] = field(init=False)
    """The bounds of masks: by function, and by mask."""
    inputs: set[tuple[str, int]] = field(init=False)
    """Inputs that have bounds instead of a mask: the names of functions, and numbers."""
    kinds: dict[tuple[str, int], set[TensorType]] = field(init=False)
    """The type of the bounds of each of these inputs."""

    def __post_init__(self) -> None:
        main = self.module.main
        self.bounds = {f.name: _all_bounds(f, self.known if f is main else {}) for f in self.module.functions}
        self.inputs = set()
        called = {op.callee for f in self.module.functions for op in f.ops if op.callee}
        for function in self.module.functions:
            outputs = {output.value.name for output in function.outputs}
            for n, item in enumerate(function.inputs):
                if function.name in called and is_mask(item.value) and item.value.name not in outputs:
                    self.inputs.add((function.name, n))
        while wrong := self._wrong():
            self.inputs -= wrong
        self.kinds = self._kinds()

    def _wrong(self) -> set[tuple[str, int]]:
        """Return the inputs that a call gives another value, or that are used otherwise."""
        wrong = set[tuple[str, int]]()
        for function in self.module.functions:
            numbers = {item.value.name: n for n, item in enumerate(function.inputs)}
            for op in function.ops:
                for n, value in enumerate(op.operands):
                    takes = self._takes(op, n)
                    if not takes and value.name in numbers:
                        wrong.add((function.name, numbers[value.name]))
                    if takes and op.callee and not self._has(function, value):
                        wrong.add((op.callee, n))
        wrong |= {place for place, kinds in self._kinds().items() if len(kinds) > 1}
        return wrong & self.inputs

    def _kinds(self) -> dict[tuple[str, int], set[TensorType]]:
        """Return the types of the bounds that calls give inputs."""
        found: dict[tuple[str, int], set[TensorType]] = {place: set() for place in self.inputs}
        calls = [(f, op) for f in self.module.functions for op in f.ops if op.callee] if found else []
        before = -1
        while before < (before := sum(map(len, found.values()))):
            for function, op in calls:
                for n, value in enumerate(op.operands):
                    if (op.callee, n) in found and value.name in self.bounds[function.name]:
                        found[op.callee, n].add(self.bounds[function.name][value.name].kind)
                    elif (op.callee, n) in found:
                        numbers = (m for m, item in enumerate(function.inputs) if item.value.name == value.name)
                        found[op.callee, n] |= set().union(*(found.get((function.name, m), set()) for m in numbers))
        return found

    def _takes(self, op: Op, number: int) -> bool:
        """Return whether an operand may have bounds."""
        if op.callee:
            return (op.callee, number) in self.inputs
        return number == lookup(op.name, op.location).code.mask

    def _has(self, function: Function, value: Value) -> bool:
        """Return whether a value has bounds, or is an input that has."""
        if value.name in self.bounds[function.name]:
            return True
        return any((function.name, n) in self.inputs for n, i in enumerate(function.inputs) if i.value == value)

    def bounded(self, function: Function) -> Function:
        """Return a function whose attention, and calls, take bounds."""
        taken, made = value_names(function), dict[str, Value]()
        inputs = list(function.inputs)
        for n, item in enumerate(inputs):
            if (function.name, n) in self.inputs:
                (kind,) = self.kinds[function.name, n]
                made[item.value.name] = Value(item.value.name, kind)
                inputs[n] = replace(item, value=made[item.value.name])
        ops, of_rows, densities = list[Op](), dict[Size, Value](), dict[str, float | None]()
        for op in function.ops:
            operands = list(op.operands)
            if self.module.stage == "global" and _is_causal(op):
                # Of a part of the rows or the keys, bounds still tell which are allowed.
                rows = op.operands[0].tensor.shape[2]
                if rows not in of_rows:
                    of_rows[rows] = Value(fresh_name("causal.bounds", taken), TensorType((rows, 2), "int64"))
                    ops.append(bounds_op(of_rows[rows], "i1 * (i0 + 1)", op.location))
                    densities[of_rows[rows].name] = _density(ops[-1], op.operands[1].tensor.shape[2])
                operands.append(of_rows[rows])
            for n, value in enumerate(op.operands):
                if not self._takes(op, n) or not self._has(function, value):
                    continue
                if value.name not in made:
                    bounds = self.bounds[function.name][value.name]
                    made[value.name] = Value(fresh_name(f"{value.name}.bounds", taken), bounds.kind)
                    ops += bounds.ops(made[value.name], taken)
                    if bounds.starts is None:
                        densities[made[value.name].name] = _density(ops[-1], value.tensor.shape[-1])
                operands[n] = made[value.name]
            ops.append(with_bounds(op, operands, densities))
        if not made and not of_rows:
            return function
        changed = replace(function, inputs=tuple(inputs), ops=tuple(ops))
        return replace(changed, ops=live_ops(changed, has_effects))


def with_bounds(op: Op, operands: Sequence[Value], densities: Mapping[str, float | None]) -> Op:
    """Return an op or a call with other operands: where those differ, they are the bounds of masks.

    `densities` are those of masks with these bounds, the part of all keys that rows attend to, where it is known.
    """
    if op.callee or tuple(operands) == op.operands:
        return replace(op, operands=tuple(operands))
    attrs: dict[str, Attribute] = {**op.attrs, "causal": False, "masked": True, "boolean": False, "bounded": True}
    density = next((densities[value.name] for value in operands if value.name in densities), None)
    return replace(op, operands=tuple(operands), attrs=attrs if density is None else {**attrs, "density": density})


def density_of(bounds: Any, keys: int) -> float:
    """Return the part of the keys that rows attend to, from their bounds (s, 2), an array."""
    first, end = bounds.clip(0, keys).T
    return round(float((end - first).clip(0).mean()) / keys, 6)


def _density(bounds: Op, keys: Size) -> float | None:
    array = lookup(bounds.name, bounds.location).semantics.array
    shape = bounds.results[0].tensor.shape
    is_known = not is_symbolic((keys, shape, bounds.attrs["sizes"])) and 0 not in (keys, *shape)
    return density_of(array(bounds.attrs), keys) if array is not None and is_known else None


def _is_causal(op: Op) -> bool:
    """Return whether attention has a causal mask alone."""
    if op.callee or lookup(op.name, op.location).code.mask is None:
        return False
    return bool(op.attrs.get("causal")) and not op.attrs["masked"]


def bounds_op(result: Value, element: str, location: str) -> Op:
    """Return the op that computes bounds (s, 2), whose `element` is that of row ``i0``, the first for ``i1 = 0``."""
    attrs: dict[str, Attribute] = {
        "value": element, "names": (), "sizes": (), "shape": result.tensor.shape, "dtype": "int64",
    }  # fmt: skip
    return Op("indexed", (), (result,), attrs, location)


def is_mask(value: Value) -> bool:
    """Return whether a value may be a mask of attention."""
    return value.tensor.dtype == "bool" and len(value.tensor.shape) >= 2


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The bounds of a mask: those of an `indexed` op, and if the mask has `starts`, of its documents."""

    indexed: Op
    starts: Value | None = None
    """Numbers (s,) or (b, s), of which the nonzero ones are at the first position of a document."""

    @property
    def kind(self) -> TensorType:
        """The type of the bounds."""
        found = self.indexed.results[0].tensor
        return found if self.starts is None else TensorType((*self.starts.tensor.shape, 2), found.dtype)

    def ops(self, result: Value, taken: set[str]) -> list[Op]:
        """Return the ops that compute the bounds, with names that are not `taken`."""
        if self.starts is None:
            return [replace(self.indexed, results=(result,))]
        ops, starts = list[Op](), self.starts
        location, kind = self.indexed.location, starts.tensor

        def emit(name: str, *operands: Value, **attrs: Attribute) -> Value:
            types = infer(name, [v.tensor for v in operands], attrs, location)
            results = tuple(Value(fresh_name(f"{result.name}.{name}", taken), each) for each in types)
            ops.append(Op(name, operands, results, attrs, location))
            return results[0]

        zero = emit("constant", value=0, dtype="int64")
        is_start = emit("not_equal", starts, emit("constant", value=0, dtype=kind.dtype))
        position = emit("arange", start=0, end=kind.shape[-1], stride=1, dtype="int64")
        first = emit("cummax", emit("where", is_start, position, zero), axis=len(kind.shape) - 1)
        of_indices = Value(fresh_name(f"{result.name}.indexed", taken), self.indexed.results[0].type)
        ops.append(replace(self.indexed, results=(of_indices,)))
        # Without an end after the first key, a row has none before and now.
        emit("maximum", emit("reshape", first, shape=(*kind.shape, 1)), of_indices)
        return [*ops[:-1], replace(ops[-1], results=(result,))]


def _all_bounds(function: Function, inputs: Mapping[str, Element]) -> dict[str, _Bounds]:
    """Return the bounds, by mask, of a function's masks that have them, given elements of some of its inputs."""
    terms = _running_sums(function)
    values = [item.value for item in function.inputs] + [v for op in function.ops for v in op.results]
    data = {value.name for value in values[: len(function.inputs)] if value.tensor.dtype == "int64"} | terms.keys()
    known = {v.name: _unknown(n, len(v.tensor.shape)) for n, v in enumerate(values) if v.name in data}
    sums, found = {known[name]: value for name, value in terms.items()}, dict[str, _Bounds]()
    elements = index_elements(function, {**known, **inputs})
    for op in function.ops:
        for value in op.results:
            if value.name in elements and is_mask(value):
                of_mask = _bounds(value, elements[value.name], sums)
                if of_mask is not None:
                    found[value.name] = replace(of_mask, indexed=replace(of_mask.indexed, location=op.location))
    return found


def _running_sums(function: Function) -> dict[str, Value]:
    """Return the terms of each running sum of truth values along the last of one or two dims, by name."""
    found, made = dict[str, Value](), producers(function)
    for op in function.ops:
        along = "" if op.callee else lookup(op.name, op.location).semantics.running_sum
        source = made.get(op.operands[0].name) if along else None
        is_last = bool(along) and op.attrs[along] == len(op.results[0].tensor.shape) - 1 <= 1
        if is_last and source is not None and _is_cast_truth(source):
            found[op.results[0].name] = op.operands[0]
    return found


def _unknown(number: int, rank: int) -> Size:
    """Return an integer that is some function of its indices, another for each `number`.

    Its sizes are not known. So nothing is proved of it but that it is equal for equal indices.
    """
    *slopes, base, divisor, least = (size_of(Symbol(f"{_UNKNOWN}{number}_{n}", low=1)) for n in range(rank + 3))
    return sum((slope * index_of(dim) for dim, slope in enumerate(slopes)), base) // divisor - least


def _is_cast_truth(op: Op) -> bool:
    """Return whether an op changes truth values to 0 and a positive number."""
    sizes = None if op.callee else lookup(op.name, op.location).semantics.sizes
    if sizes is None or [v.tensor.dtype for v in op.operands] != ["bool"] or "int" not in op.results[0].tensor.dtype:
        return False
    no, yes = (int(sizes([np.array(x, object)], op.attrs)) for x in (False, True))
    return no == 0 < yes


def _starts(part: Condition, mask: Value, sums: Mapping[Size, Value]) -> Value | None:
    """Return the terms of the running sum whose elements a condition compares: that of a row, and that of a key."""
    shape = mask.tensor.shape
    index = [index_of(dim) if n != 1 else 0 for dim, n in enumerate(shape)]
    for element, terms in sums.items():
        # Samples are the first of four dims.
        batch = index[:1] if len(terms.tensor.shape) == 2 else []
        is_whole = terms.tensor.shape == (*shape[: len(batch)], shape[-2]) and shape[-2] == shape[-1]
        if is_whole and len(shape) == (4 if batch else 2):
            of_row, of_key = (reindexed_number(element, [*batch, number]) for number in index[-2:])
            if compared(of_row, "==", of_key, ()) == part:
                return terms
    return None


def _bounds(mask: Value, element: Element, sums: Mapping[Size, Value]) -> _Bounds | None:
    """Return the bounds of a mask; None if they do not describe it."""
    shape = mask.tensor.shape
    element, starts = reindexed(element, [index_of(dim) if n != 1 else 0 for dim, n in enumerate(shape)]), None
    parts = element.parts if isinstance(element, Condition) and element.kind == "and" else (element,)
    if equal := [part for part in parts if isinstance(part, Condition) and part.kind == "=="]:
        starts = _starts(equal[0], mask, sums)
        if starts is None or len(equal) > 1:
            return None
        element = all_of(part for part in parts if part is not equal[0])
    found = _first_and_end(element, shape)
    if found is None:
        return None
    # The rows are dim 0 of the bounds; of the dims before them, all elements are alike.
    indices = (*[0] * (len(shape) - 2), index_of(0))
    used = {symbol for numbers in found for size in numbers for symbol in symbols_within(size)}
    rows, row = shape[-2], index_of(len(shape) - 2)
    if not {s for s in used if is_index(s) or s.name.startswith(_UNKNOWN)} <= symbols_within(row):
        return None
    if starts is not None and not any(compared(end, "<=", row + 1, shape) is True for end in found[1]):
        # A row attends to later keys, and to the end of its document.
        return None
    firsts, ends = ([reindexed_number(size, indices) for size in numbers] for numbers in found)
    firsts, ends = _extremes(">=", [0, *firsts], rows), _extremes("<=", [shape[-1], *ends], rows)
    first, end = joined("max", firsts), joined("min", ends)
    value = f"i1 * ({end})" if firsts == [0] else f"(1 - i1) * ({first}) + i1 * ({end})"
    symbols = frozenset().union(*map(symbols_within, (*firsts, *ends)))
    names = sorted((symbol for symbol in symbols if not is_index(symbol)), key=str)
    kind = TensorType((rows, 2), "int64")
    attrs: dict[str, Attribute] = {
        "value": value, "names": tuple(map(str, names)), "sizes": tuple(map(size_of, names)), "shape": kind.shape,
        "dtype": kind.dtype,
    }  # fmt: skip
    return _Bounds(Op("indexed", (), (replace(mask, type=kind),), attrs), starts)


def _first_and_end(element: Element, shape: Sequence[Size]) -> tuple[list[Size], list[Size]] | None:
    """Return lower bounds of the last index where a mask is true, and numbers that it is below; None for others."""
    index = index_of(len(shape) - 1)
    (symbol,) = symbols_within(index)
    firsts, ends = list[Size](), list[Size]()
    if isinstance(element, bool):
        return ([], []) if element else None
    if not isinstance(element, Condition):
        return None
    for part in element.parts if element.kind == "and" else (element,):
        if not isinstance(part, Condition) or part.kind != "<=":
            return None
        difference = part.parts[1] - part.parts[0]
        times = dict(difference.terms).get((symbol,)) if isinstance(difference, SymbolicSize) else None
        if times not in (1, -1):
            return None
        rest = difference - times * index
        if symbol in symbols_within(rest):
            return None
        if times < 0:
            ends.append(rest + 1)
        else:
            firsts.append(-1 * rest)
    return firsts, ends


def _extremes(relation: str, numbers: Sequence[Size], rows: Size) -> list[Size]:
    """Return the numbers without those that another one has this relation to in every row."""
    left = list(dict.fromkeys(numbers))
    for number in tuple(left):
        if any(compared(other, relation, number, (rows,)) is True for other in left if other != number):
            left.remove(number)
    return left


def joined(function: str, numbers: Sequence[Size]) -> str:
    """Return the text of a function of numbers, ``max`` or ``min``; of one, the number."""
    return str(numbers[0]) if len(numbers) == 1 else f"{function}({', '.join(map(str, numbers))})"
