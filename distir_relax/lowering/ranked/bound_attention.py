"""Masks of attention as bounds: the first key of each row, and the one after the last.

A causal mask, and that of a sliding window, need two numbers for each row, where a tensor has one for each key:

    %mask: bool[new, new + past] = indexed() {value="i1 <= i0 + past", ...}
    %mask.bounds: i64[new, 2] = indexed() {value="i1 * (i0 + past + 1)", ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from distir_relax.ir import Attribute, Function, Module, Op, TensorType, Value, fresh_name, live_ops, value_names
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import assuming, is_symbolic, size_of, symbols_within
from distir_relax.layout.symbolic_size import Size, SymbolicSize
from distir_relax.lowering.ranked.index_positions import index_elements
from distir_relax.lowering.ranked.skip_repeats import has_effects
from distir_relax.ops import lookup
from distir_relax.ops.table import Element, is_index
from distir_relax.ops.table.index_expression import Condition, compared, index_of, reindexed_number


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """Pass: global or ranked stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("global", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Give attention (`Code.mask`) the bounds of its masks, where those are functions of positions alone.

        In the global stage a causal mask that is no operand becomes bounds, too.
        """
        if any(is_index(symbol) for symbol in module_symbols(module).values()):
            return module
        with assuming(module.guards):
            masks = _Masks(module)
            return replace(module, functions=tuple(map(masks.bounded, module.functions)))


@dataclass(slots=True)
class _Masks:
    """The masks of a module that have bounds: values of a function, and inputs of functions that all calls give one."""

    module: Module
    bounds: dict[str, dict[str, Op]] = field(init=False)
    """The ops that compute the bounds of masks: by function, and by mask."""
    inputs: set[tuple[str, int]] = field(init=False)
    """Inputs that have bounds instead of a mask: the names of functions, and numbers."""

    def __post_init__(self) -> None:
        self.bounds = {f.name: _all_bounds(f) for f in self.module.functions}
        self.inputs = set()
        called = {op.callee for f in self.module.functions for op in f.ops if op.callee}
        for function in self.module.functions:
            outputs = {output.value.name for output in function.outputs}
            for n, item in enumerate(function.inputs):
                if function.name in called and is_mask(item.value) and item.value.name not in outputs:
                    self.inputs.add((function.name, n))
        while wrong := self._wrong():
            self.inputs -= wrong

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
        return wrong & self.inputs

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
                made[item.value.name] = Value(item.value.name, _kind(item.value))
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
                    made[value.name] = Value(fresh_name(f"{value.name}.bounds", taken), _kind(value))
                    ops.append(replace(self.bounds[function.name][value.name], results=(made[value.name],)))
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


def _kind(mask: Value) -> TensorType:
    """Return the type of the bounds of a mask."""
    return TensorType((mask.tensor.shape[-2], 2), "int64")


def _all_bounds(function: Function) -> dict[str, Op]:
    """Return the ops that compute bounds, by mask, of a function's masks that have them."""
    elements, found = index_elements(function), dict[str, Op]()
    for op in function.ops:
        for value in op.results:
            if value.name in elements and is_mask(value):
                of_mask = _bounds(value, elements[value.name])
                if of_mask is not None:
                    found[value.name] = replace(of_mask, location=op.location)
    return found


def _bounds(mask: Value, element: Element) -> Op | None:
    """Return the op that computes the bounds of a mask; None if they do not describe it."""
    shape = mask.tensor.shape
    found = _first_and_end(element, shape)
    if found is None:
        return None
    # The rows are dim 0 of the bounds; of the dims before them, all elements are alike.
    indices = (*[0] * (len(shape) - 2), index_of(0))
    used = {symbol for numbers in found for size in numbers for symbol in symbols_within(size) if is_index(symbol)}
    if not used <= symbols_within(index_of(len(shape) - 2)):
        return None
    rows = shape[-2]
    firsts, ends = ([reindexed_number(size, indices) for size in numbers] for numbers in found)
    firsts, ends = _extremes(">=", [0, *firsts], rows), _extremes("<=", [shape[-1], *ends], rows)
    first, end = _joined("max", firsts), _joined("min", ends)
    value = f"i1 * ({end})" if firsts == [0] else f"(1 - i1) * ({first}) + i1 * ({end})"
    symbols = frozenset().union(*map(symbols_within, (*firsts, *ends)))
    names = sorted((symbol for symbol in symbols if not is_index(symbol)), key=str)
    kind = _kind(mask)
    attrs: dict[str, Attribute] = {
        "value": value, "names": tuple(map(str, names)), "sizes": tuple(map(size_of, names)), "shape": kind.shape,
        "dtype": kind.dtype,
    }  # fmt: skip
    return Op("indexed", (), (replace(mask, type=kind),), attrs)


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


def _joined(function: str, numbers: Sequence[Size]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{function}({', '.join(map(str, numbers))})"
