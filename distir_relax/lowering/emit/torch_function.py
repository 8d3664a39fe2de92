"""Torch code generation for one function; values that depend only on weights are computed once, in `prepare`."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.ir import TASK, Function, Op, Value, fresh_name, value_names
from distir_relax.layout import Symbol, is_symbolic
from distir_relax.lowering.ranked.lasting_values import fixed_values, sized_values, symbols_in_code
from distir_relax.ops import (
    Trait,
    is_packable,
    lookup,
    packed_operands,
    reused_operands,
    torch_buffered,
    torch_expression,
    torch_in_place,
    torch_packing,
    torch_reusing,
)

# Values with larger storage are deleted after their last use; for smaller ones the extra line is not worth it.
_LARGE = 1 << 11
# CPython packs more arguments into a tuple, which keeps them alive until the function returns: pass a list instead.
_MAX_ARGUMENTS = 30


@dataclass(frozen=True, slots=True)
class Callee:
    """A function's interface for its callers.

    `name` and `prepare` are the names of its Python functions (`prepare` is empty if there is none); `weights` maps the
    numbers of inputs that come with its weights to their names there; `arguments` are the numbers of the others, which
    are passed `as_list` if there are many. Values of the `symbols` come before them.
    """

    name: str
    prepare: str
    weights: Mapping[int, str]
    arguments: Sequence[int]
    as_list: bool
    symbols: Sequence[str] = ()

    @property
    def takes_weights(self) -> bool:
        """Whether calls pass weights: its own, or values that it computes once from constants."""
        return bool(self.weights or self.prepare)


@dataclass(frozen=True, slots=True)
class ClockedOp:
    """An op whose end a program records (`kernels.clock`), and which of its operands never change."""

    op: Op
    fixed: tuple[bool, ...]


@dataclass(slots=True)
class TorchFunction:
    """The text of one function. `stored` are the inputs that are in its `weights`; `fixed` values never change.

    With `clocked`, it records the end of each op by its number there, where the ops are appended. If it is `checked`, a
    result with a NaN is an error (`kernels.finite`).

    Values of the entry function that depend on sizes and fixed values only are computed once for each choice of sizes,
    unless they are `mutated`.
    """

    function: Function
    name: str
    stored: Collection[str]
    fixed: set[str]
    callees: Mapping[str, Callee]
    taken: set[str]
    mutated: Collection[str] = ()
    clocked: list[ClockedOp] | None = None
    checked: bool = False
    by_call: bool = True
    """Whether `prepare_sizes` runs for the sizes of a call, rather than for a block of positions."""
    keys: dict[str, str] = field(default_factory=dict)
    """The name of each call's weights, by the name of its first result; calls with equal weights share one."""
    names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    """The code of each number, by name."""
    number_symbols: dict[str, frozenset[Symbol]] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)
    """The name of an op's packed weights, by the name of the op's result."""
    symbols: Sequence[str] = ()
    """The symbols of the function's sizes and those of its callees."""
    prepare: str = ""
    prepare_sizes: str = ""
    sized: set[str] = field(default_factory=set)
    """The values that depend on sizes and fixed values only."""
    sized_results: list[str] = field(default_factory=list)
    """Those of them that `prepare_sizes` returns."""
    masks: set[str] = field(default_factory=set)
    """Those of them that may be None instead, if all their elements are true (`Code.none_if_true`)."""

    def __post_init__(self) -> None:
        for item in self.function.inputs:
            if item.value.name in self.stored:
                self.names[item.value.name] = f"weights[{json.dumps(item.value.name)}]"
            else:
                self._name(item.value)
        symbols = {symbol.name for op in self.function.ops for symbol in symbols_in_code(op)}
        self.symbols = sorted(symbols.union(*(c.symbols for c in self._called())))
        self.fixed = fixed_values(self.function, self.fixed)
        self._name_weights()
        self._choose_packed(self.fixed)
        self.prepare = self._prepare(self.fixed)
        self.sized = (
            sized_values(self.function, self.fixed, self.mutated) if self.name == "main" and self.symbols else set()
        )
        self.prepare_sizes = self._prepare_sizes(self.sized)
        for op in self.remaining_ops():
            for value in op.results:
                if value.name not in self.names:
                    self._name(value)

    @property
    def prepare_name(self) -> str:
        """The name of the function that prepares the weights."""
        return "prepare" if self.name == "main" else f"prepare_{self.name}"

    def text(self) -> str:
        """Return the Python functions: those that prepare weights and sizes, if needed, and the function itself."""
        return self.prepare + self.prepare_sizes + self.definition(self.name, self.symbols, self._body())

    def definition(self, name: str, sizes: Sequence[str], body: Sequence[str]) -> str:
        """Return a Python function with the function's inputs and results; `body` are the lines before it returns.

        It takes the communicator, the weights if there are any, `sizes` or what else there is, and then the inputs.
        """
        arguments = [self.names[v.name] for v in self.arguments()]
        weights = ["weights"] if self.stored or self.prepare or self.name == "main" else []
        outputs = [self.names[o.value.name] for o in self.function.outputs]
        result = (
            f"({', '.join(outputs)}{',' if len(outputs) == 1 else ''})" if self.name == "main" else ", ".join(outputs)
        )
        unpack = ""
        if self.name != "main" and _needs_list(arguments):
            unpack, arguments = f"    {', '.join(arguments)} = emptied(given)\n", ["given"]
        if self.prepare_sizes:
            arguments = ["of_sizes", *arguments]
            names = [self.names[name] for name in self.sized_results]
            unpack = f"    {', '.join(names)}{',' * (len(names) == 1)} = of_sizes\n"
        return (
            f"def {name}({', '.join(['comm', *weights, *sizes, *arguments])}):\n"
            + ("" if self.clocked is None or self.name != "main" else "    clock(-1)\n")
            + unpack
            + ("" if not self.checked or self.name != "main" else self._begin_checks())
            + "".join(f"    {line}\n" for line in body)
            + f"    return {result}\n"
        )

    def arguments(self) -> list[Value]:
        """Return the inputs that are not among the weights."""
        return [i.value for i in self.function.inputs if i.value.name not in self.stored]

    def callee(self) -> Callee:
        """Return the function's interface."""
        names = {number: item.value.name for number, item in enumerate(self.function.inputs)}
        arguments = [number for number, name in names.items() if name not in self.stored]
        return Callee(
            self.name,
            self.prepare_name if self.prepare else "",
            {number: name for number, name in names.items() if name in self.stored},
            arguments,
            _needs_list(arguments),
            self.symbols,
        )

    def _called(self) -> list[Callee]:
        return [self.callees[op.callee] for op in self.function.ops if op.callee]

    def _prepare(self, fixed: set[str]) -> str:
        """Generate the function `prepare`; empty if every weight is used unchanged."""
        hoisted = [op for op in self.function.ops if op.results[0].name in fixed and not self.is_number(op)]
        remaining = [op for op in self.function.ops if op.results[0].name not in fixed]
        self._collect_numbers()
        first_call = {self.keys[op.results[0].name]: op for op in reversed(remaining) if op.callee}
        calls = [op for op in reversed(first_call.values()) if self.callees[op.callee].takes_weights]
        if not hoisted and not self.packed and not calls:
            return ""
        used = {o.value.name for o in self.function.outputs}
        for op in remaining:
            unused = self._packed_operands(op) if not op.callee else self.callees[op.callee].weights
            used.update(v.name for i, v in enumerate(op.operands) if i not in unused)
        for op in hoisted:
            for value in op.results:
                self.names[value.name] = f"weights[{json.dumps(value.name)}]"
        parts = [(self.op_lines(op), op) for op in hoisted]
        packs = {self._pack(op): op for op in remaining if op.results[0].name in self.packed}
        parts += [([line], op) for line, op in packs.items()]
        # The last call that takes a weight pops it, so that a packed weight is in memory only once.
        last = {op.operands[i].name: (op.results[0], i) for op in calls for i in self.callees[op.callee].weights}
        popped = {name: end for name, end in last.items() if name not in used and name in self.names}
        parts += [(self._bundle(op, popped), op) for op in calls]
        weights = [i.value.name for i in self.function.inputs if i.value.name in self.stored]
        outs = [v.name for op in hoisted for v in op.results]
        dead = [name for name in (*weights, *outs) if name not in used and name not in popped]
        # Each weight is freed before the next is read (`RankWeights`).
        last_part = {v.name: number for number, (_, op) in enumerate(parts) for v in op.operands}
        freed = [[f"del {self.names[name]}" for name in dead if last_part.get(name, 0) == n] for n in range(len(parts))]
        lines = [line for (of_op, _), after in zip(parts, freed, strict=True) for line in (*of_op, *after)]
        return (
            f"def {self.prepare_name}(comm, weights):\n"
            + "".join(f"    {line}\n" for line in lines)
            + "    return weights\n\n\n"
        )

    def _prepare_sizes(self, sized: set[str]) -> str:
        """Generate the function `prepare_sizes`; empty if no value depends on sizes alone."""
        ops = [op for op in self.function.ops if op.results[0].name in sized and not self.is_number(op)]
        if not ops:
            return ""
        lines = [line for op in ops for line in self.op_lines(op)]
        remaining = [op for op in self.function.ops if op.results[0].name not in sized]
        used = {v.name for op in remaining for v in op.operands} | {o.value.name for o in self.function.outputs}
        self.sized_results = [v.name for op in ops for v in op.results if v.name in used]
        self.masks = self._masks(remaining)
        results = [
            f"attention.unless_all_true({self.names[name]})"
            if name in self.masks and self.by_call
            else self.names[name]
            for name in self.sized_results
        ]
        return (
            f"def prepare_sizes({', '.join(['comm', 'weights', *self.symbols])}):\n"
            + "".join(f"    {line}\n" for line in lines)
            + f"    return [{', '.join(results)}]\n\n\n"
        )

    def _masks(self, ops: Sequence[Op]) -> set[str]:
        """Return the results of `prepare_sizes` that only operands `Code.none_if_true` of the other ops use."""
        users = [
            (v.name, not op.callee and n in lookup(op.name, op.location).code.none_if_true and v.tensor.dtype == "bool")
            for op in ops
            for n, v in enumerate(op.operands)
        ]
        others = {name for name, may_be_none in users if not may_be_none}
        others |= {o.value.name for o in self.function.outputs}
        return set(self.sized_results) - others

    def _name_weights(self) -> None:
        """Name the weights of calls after their locations in the model."""
        function = self.function
        used_names = value_names(function)
        key_of: dict[object, str] = {}
        for op in function.ops:
            if op.callee:
                key = (op.callee, *(op.operands[i] for i in self.callees[op.callee].weights))
                if key not in key_of:
                    key_of[key] = fresh_name(op.location or op.callee, used_names)
                self.keys[op.results[0].name] = key_of[key]

    def _bundle(self, op: Op, popped: Mapping[str, tuple[Value, int]]) -> list[str]:
        """Generate the weights of a call, under their names in the callee.

        `popped` weights are removed from the caller's, by the call with that first result, as that operand.
        """
        callee = self.callees[op.callee]
        entries = []
        for number, name in callee.weights.items():
            operand = op.operands[number]
            is_popped = popped.get(operand.name) == (op.results[0], number)
            source = f"weights.pop({json.dumps(operand.name)})" if is_popped else self._use(operand)
            entries.append(f"    {json.dumps(name)}: {source},")
        begin, end = (f"{callee.prepare}(comm, {{", "})") if callee.prepare else ("{", "}")
        return [f"weights[{json.dumps(self.keys[op.results[0].name])}] = {begin}", *entries, end]

    def remaining_ops(self) -> list[Op]:
        """Return the ops that every call runs."""
        early = self.fixed | self.sized
        return [op for op in self.function.ops if op.results[0].name not in early and not self.is_number(op)]

    def _body(self) -> list[str]:
        ops, early = self.remaining_ops(), self.fixed | self.sized
        last = {v.name: number for number, op in enumerate(ops) for v in op.operands}
        live = {o.value.name for o in self.function.outputs}
        live |= set(self.stored)
        large = _large_storage(self.function)
        reused = reused_operands(self.function, early)
        lines: list[str] = []
        for number, op in enumerate(ops):
            dead = [
                v
                for v in dict.fromkeys(op.operands)
                if last[v.name] == number and v.name not in early and v.name not in live and v.name in large
            ]
            unused = [v for v in op.results if v.name not in last and v.name not in live and v.name in large]
            if op.callee:
                stage, kind, microbatch = (op.attrs.get(key) for key in TASK)
                lines += [f"comm.begin({stage}, {json.dumps(kind)}, {microbatch})"] if op.task else []
                callee = self.callees[op.callee]
                lines += [f"finite.enter({json.dumps(op.location or callee.name)})"] if self.checked else []
                lines.append(self.call(op, callee.name, callee.symbols, dead))
                lines += ["finite.leave()"] if self.checked else []
                lines += ["comm.end()"] if op.task else []
                dead = unused
            else:
                lines += self.op_lines(op, overwritten=reused.get(op.results[0].name) if op.results else None)
                lines += self._check_lines(op) if self.checked else []
                dead += unused
            if dead:
                lines.append(f"del {', '.join(self.names[v.name] for v in dead)}")
            lines += [] if op.callee else self.clock_lines(op)
        return lines

    def call(self, op: Op, name: str, sizes: Sequence[str], dead: Sequence[Value] = ()) -> str:
        """Return the line of a call of a Python function with the `definition` of its callee.

        It takes over the values that are `dead` after it.
        """
        callee = self.callees[op.callee]
        key = json.dumps(self.keys[op.results[0].name])
        arguments = [*([f"weights[{key}]"] if callee.takes_weights else []), *sizes]
        moved = set()
        for number in callee.arguments:
            value = op.operands[number]
            given = self._use(value)
            if value in dead and value not in moved:
                moved.add(value)
                given = f"moved({given}, {given} := None)"
            arguments.append(given)
        if callee.as_list:
            first = len(arguments) - len(callee.arguments)
            arguments[first:] = [f"[{', '.join(arguments[first:])}]"]
        return self.line(op, f"{name}({', '.join(['comm', *arguments])})")

    def op_lines(self, op: Op, buffered: bool = False, overwritten: int | None = None) -> list[str]:
        """Return the lines of an op that is not a call; with a buffer as operand 0, if it is `buffered`.

        The result is written to the memory of operand `overwritten`, if that is not None.
        """
        operands = self.operands(op)
        if buffered:
            code = torch_buffered(op, operands)
        elif op.results[0].name in self.packed:
            code = f"weights[{json.dumps(self.packed[op.results[0].name])}]({', '.join(self.unpacked(op))})"
        elif overwritten is not None:
            code = torch_reusing(op, operands, overwritten)
        else:
            code = torch_in_place(op, operands) or torch_expression(op, operands)
        return [self.line(op, code)]

    def unpacked(self, op: Op) -> list[str]:
        """Return the expressions of the operands that an op with packed weights takes."""
        packed = packed_operands(op)
        return [code for number, code in enumerate(self.operands(op)) if number not in packed]

    def operands(self, op: Op) -> list[str]:
        """Return the expressions of the operands of an op that is not a call."""
        entry = lookup(op.name, op.location)
        # Numbers alone would have torch's default dtype.
        has_tensor = any(op.operands[i].name not in self.numbers for i in entry.code.numbers)
        literal = entry.code.numbers if has_tensor else frozenset()
        return [
            self.numbers[v.name] if v.name in self.numbers and i in literal else self._use(v)
            for i, v in enumerate(op.operands)
        ]

    def sizes_in_code(self, op: Op) -> set[str]:
        """Return the names of the symbols in the code of an op, those of numbers that it contains included."""
        numbers = (self.number_symbols.get(v.name, frozenset()) for v in op.operands)
        return {symbol.name for symbol in symbols_in_code(op).union(*numbers)}

    def _begin_checks(self) -> str:
        """Return the line that checks the inputs and the weights."""
        inputs = ", ".join(f"({json.dumps(v.name)}, {self.names[v.name]})" for v in self.arguments())
        return f"    finite.begin([{inputs}], weights)\n"

    def _check_lines(self, op: Op) -> list[str]:
        """Return the line that checks the results of an op."""
        floats = [v for v in op.results if "float" in v.tensor.dtype]
        # A started op has no result yet.
        if not floats or Trait.STARTS in lookup(op.name, op.location).traits:
            return []
        names = ", ".join(f"%{v.name}" for v in op.results)
        what = f"{names} = {op.name}" + (f"  # {op.location}" if op.location else "")
        return [f"finite.check(comm, {json.dumps(what)}, {', '.join(self.names[v.name] for v in floats)})"]

    def clock_lines(self, op: Op) -> list[str]:
        """Return the lines after an op that record its end."""
        if self.clocked is None:
            return []
        self.clocked.append(ClockedOp(op, tuple(v.name in self.fixed for v in op.operands)))
        return [f"clock({len(self.clocked) - 1})"]

    def line(self, op: Op, code: str, results: Sequence[Value] = ()) -> str:
        """Return the line that assigns the results of `code` to the variables of an op's, or of some of them."""
        targets = ", ".join(self.names.get(v.name) or self._name(v) for v in results or op.results)
        return f"{targets} = {code}{_comment(op.location)}"

    def _choose_packed(self, fixed: set[str]) -> None:
        """Choose the ops that use a packed form of their weights, and its name; see `Code.packed`."""
        packed_by_name: dict[str, object] = {}
        for op in self.function.ops:
            if op.callee or op.results[0].name in fixed or not is_packable(op):
                continue
            weights = tuple(op.operands[number] for number in packed_operands(op))
            if not all(v.name in fixed for v in weights):
                continue
            base = f"{op.operands[1].name}.packed"
            key = (op.name, weights, _rows(op))
            name, count = base, 1
            while packed_by_name.setdefault(name, key) != key:
                count += 1
                name = f"{base}_{count}"
            self.packed[op.results[0].name] = name

    def _packed_operands(self, op: Op) -> Collection[int]:
        return packed_operands(op) if op.results[0].name in self.packed else ()

    def _pack(self, op: Op) -> str:
        names = [self.names.get(v.name, "") for v in op.operands]
        code = torch_packing(op, names, _rows(op))
        return f"weights[{json.dumps(self.packed[op.results[0].name])}] = {code}"

    def _use(self, value: Value) -> str:
        if value.name in self.numbers:
            kind = value.tensor
            return f"torch.tensor({self.numbers[value.name]}, dtype=torch.{kind.dtype}, device=comm.device)"
        return self.names[value.name]

    def _collect_numbers(self) -> None:
        for op in self.function.ops:
            if self.is_number(op):
                number = op.attrs["value"]
                self.number_symbols[op.results[0].name] = symbols_in_code(op)
                text = f'float("{number}")' if str(number) in ("inf", "-inf", "nan") else repr(number)
                # Next to an operator, only a name or a number without a sign stands for itself.
                is_atom = not text.startswith("-") and (text.isidentifier() or not is_symbolic(number))
                self.numbers[op.results[0].name] = text if is_atom else f"({text})"

    def is_number(self, op: Op) -> bool:
        """Whether an op is a number that the code of its users contains."""
        return Trait.SCALAR in lookup(op.name).traits and all(
            o.value.name != op.results[0].name for o in self.function.outputs
        )

    def _name(self, value: Value) -> str:
        base = identifier(value.name, "v")
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        self.names[value.name] = name
        return name


def identifier(name: str, prefix: str) -> str:
    """Return a Python identifier for a name of a program, in ASCII: Python takes some other characters for these."""
    result = re.sub(r"\W", "_", name, flags=re.ASCII)
    return result if result.isidentifier() and not keyword.iskeyword(result) else f"{prefix}_{result}"


def _comment(location: str) -> str:
    """Return the comment with a place in the model, on one line: Python ends lines at more characters than texts do."""
    shown = location if location.isprintable() else repr(location)
    return f"  # {shown}" if location else ""


def _needs_list(arguments: Sequence[object]) -> bool:
    # Communicator and weights come before them.
    return len(arguments) + 2 > _MAX_ARGUMENTS


def _rows(op: Op) -> int:
    """Return the number of rows of an op's result, typically if it is symbolic."""
    result = op.results[0].tensor.typical
    return result.elements // result.shape[-1] if result.elements else 0


def _large_storage(function: Function) -> set[str]:
    """Return the values with storage larger than `_LARGE`: a small view keeps its whole base alive."""
    large = {item.value.name for item in function.inputs if item.value.tensor.bytes > _LARGE}
    for op in function.ops:
        is_view = not op.callee and bool(op.operands) and lookup(op.name, op.location).shares_storage
        if is_view and op.operands[0].name in large:
            large.update(v.name for v in op.results)
        large.update(v.name for v in op.results if v.tensor.bytes > _LARGE)
    return large
