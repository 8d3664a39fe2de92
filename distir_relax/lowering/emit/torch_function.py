"""Torch code generation for one function of the executable stage, in its parts."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.executable.hoist import SIZED, is_constant, numbers_of, prepared_name
from distir_relax.executable.lasting_values import symbols_in_code
from distir_relax.ir import TASK, Function, Op, TensorType, Value
from distir_relax.layout import Symbol, is_symbolic
from distir_relax.ops import Trait, lookup, torch_kernel, torch_packing

# CPython packs more arguments into a tuple, which keeps them alive until the function returns: pass a list instead.
_MAX_ARGUMENTS = 30


@dataclass(frozen=True, slots=True)
class Callee:
    """A function's interface for its callers.

    `name` and `prepare` are the names of its Python functions (`prepare` is empty if there is none). `weights` are the
    names of weights before they are prepared, and `constants` those of its inputs that are prepared weights, after a
    number of `arguments`, which are passed `as_list` if there are many. Values of the `symbols` come before these.
    """

    name: str
    prepare: str
    weights: Sequence[str]
    constants: Sequence[str]
    arguments: int
    as_list: bool
    symbols: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ClockedOp:
    """An op whose end a program records (`kernels.clock`), and which of its operands never change."""

    op: Op
    fixed: tuple[bool, ...]


@dataclass(slots=True)
class Scope:
    """The variables of a Python function, and the lines of the ops of `function`.

    `names` are the expressions of values: inputs that come with the weights, and everything `of_weights`, are entries
    of the dictionary ``weights``. No variable is called as one of the names `taken`.
    """

    function: Function
    taken: set[str]
    of_weights: bool = False
    names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    """The code of each number, by name."""
    number_symbols: dict[str, frozenset[Symbol]] = field(default_factory=dict)
    ops: list[Op] = field(init=False)
    """The ops, without numbers."""

    def __post_init__(self) -> None:
        for item in self.function.inputs:
            if self.of_weights or is_constant(item):
                self.names[item.value.name] = f"weights[{json.dumps(item.value.name)}]"
            else:
                self.name(item.value)
        for name, op in numbers_of(self.function).items():
            number = op.attrs["value"]
            self.number_symbols[name] = symbols_in_code(op)
            text = f'float("{number}")' if str(number) in ("inf", "-inf", "nan") else repr(number)
            # Next to an operator, only a name or a number without a sign stands for itself.
            is_atom = not text.startswith("-") and (text.isidentifier() or not is_symbolic(number))
            self.numbers[name] = text if is_atom else f"({text})"
        self.ops = [op for op in self.function.ops if not op.results or op.results[0].name not in self.numbers]

    def op_line(self, op: Op) -> str:
        """Return the line of an op that is not a call."""
        return self.line(op, torch_kernel(op, self.operands(op)))

    def operands(self, op: Op) -> list[str]:
        """Return the expressions of the operands of an op that is not a call."""
        entry = lookup(op.name, op.location)
        # Numbers alone would have torch's default dtype.
        has_tensor = any(op.operands[i].name not in self.numbers for i in entry.code.numbers)
        literal = entry.code.numbers if has_tensor else frozenset()
        return [
            self.numbers[v.name] if v.name in self.numbers and i in literal else self.use(v)
            for i, v in enumerate(op.operands)
        ]

    def line(self, op: Op, code: str, results: Sequence[Value] = ()) -> str:
        """Return the line that assigns the results of `code` to the variables of an op's, or of some of them."""
        targets = ", ".join(self.names.get(v.name) or self.name(v) for v in results or op.results)
        return f"{targets} = {code}{comment(op.location)}"

    def use(self, value: Value) -> str:
        """Return the expression of a value."""
        if value.name in self.numbers:
            kind = value.tensor
            return f"torch.tensor({self.numbers[value.name]}, dtype=torch.{kind.dtype}, device=comm.device)"
        return self.names[value.name]

    def sizes_in_code(self, op: Op) -> set[str]:
        """Return the names of the symbols in the code of an op, those of numbers that it contains included."""
        numbers = (self.number_symbols.get(v.name, frozenset()) for v in op.operands)
        return {symbol.name for symbol in symbols_in_code(op).union(*numbers)}

    def name(self, value: Value) -> str:
        """Name the variable of a value; return the name."""
        if self.of_weights:
            self.names[value.name] = f"weights[{json.dumps(value.name)}]"
            return self.names[value.name]
        base = identifier(value.name, "v")
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        self.names[value.name] = name
        return name


@dataclass(slots=True)
class TorchFunction:
    """The text of one function, called `name`: of the part that every call runs, and of those that run once.

    `before` are the parts that prepare weights and values of sizes, where the function has them. With `clocked`, it
    records the end of each op by its number there, where the ops are appended. If it is `checked`, a result with a NaN
    is an error (`kernels.finite`).
    """

    function: Function
    name: str
    before: tuple[Function | None, Function | None]
    callees: Mapping[str, Callee]
    taken: set[str]
    clocked: list[ClockedOp] | None = None
    checked: bool = False
    by_call: bool = True
    """Whether values of sizes are computed for the sizes of a call, rather than for a block of positions."""
    scope: Scope = field(init=False)
    symbols: Sequence[str] = ()
    """The symbols of the function's sizes and those of its callees."""
    masks: set[str] = field(default_factory=set)
    """The values of sizes that may be None instead, if all their elements are true (`Code.mask`)."""

    def __post_init__(self) -> None:
        self.scope = Scope(self.function, set(self.taken))
        ops = [op for part in (self.function, self.before[1]) if part is not None for op in part.ops]
        symbols = {symbol.name for op in ops for symbol in symbols_in_code(op)}
        callees = [self.callees[op.callee] for op in self.function.ops if op.callee in self.callees]
        self.symbols = sorted(symbols.union(*(callee.symbols for callee in callees)))
        self.masks = masks_of(self.function.ops, self.function)
        for op in self.scope.ops:
            for value in op.results:
                self.scope.name(value)

    @property
    def constants(self) -> list[str]:
        """The names of the inputs that come with the weights."""
        return [i.value.name for i in self.function.inputs if is_constant(i)]

    @property
    def sized(self) -> list[Value]:
        """The inputs that are computed for a choice of sizes."""
        return [i.value for i in self.function.inputs if i.role == SIZED]

    @property
    def arguments(self) -> list[Value]:
        """The inputs that calls pass."""
        return [i.value for i in self.function.inputs if i.role == "input"]

    def text(self) -> str:
        """Return the Python functions: those that prepare weights and sizes, if needed, and the function itself."""
        return self.prepare() + self.prepare_sizes() + self._definition(self._body())

    def _definition(self, body: Sequence[str]) -> str:
        """Return the Python function with the function's inputs and results; `body` are the lines before it returns."""
        names = self.scope.names
        arguments = [names[v.name] for v in self.arguments]
        weights = ["weights"] if self.constants or self.name == "main" else []
        outputs = [names[o.value.name] for o in self.function.outputs]
        result = (
            f"({', '.join(outputs)}{',' if len(outputs) == 1 else ''})" if self.name == "main" else ", ".join(outputs)
        )
        unpack = ""
        if self.name != "main" and _needs_list(arguments):
            unpack, arguments = f"    {', '.join(arguments)} = emptied(given)\n", ["given"]
        if self.before[1] is not None:
            arguments = ["of_sizes", *arguments]
            sized = [names[v.name] for v in self.sized]
            unpack = f"    {', '.join(sized)}{',' * (len(sized) == 1)} = of_sizes\n"
        return (
            f"def {self.name}({', '.join(['comm', *weights, *self.symbols, *arguments])}):\n"
            + ("" if self.clocked is None or self.name != "main" else "    clock(-1)\n")
            + unpack
            + ("" if not self.checked or self.name != "main" else self._begin_checks())
            + "".join(f"    {line}\n" for line in body)
            + f"    return {result}\n"
        )

    def callee(self) -> Callee:
        """Return the function's interface."""
        weights = [i.value.name for part in self.before[:1] if part is not None for i in part.inputs]
        return Callee(
            self.name,
            self._prepare_name if self._prepares else "",
            weights,
            self.constants,
            len(self.arguments),
            _needs_list(self.arguments),
            self.symbols,
        )

    @property
    def _prepare_name(self) -> str:
        return "prepare" if self.name == "main" else f"prepare_{self.name}"

    @property
    def _prepares(self) -> bool:
        """Whether anything is computed of the weights: else they are used as they are."""
        return self.before[0] is not None and bool(self.before[0].ops)

    def prepare(self) -> str:
        """Return the Python function that prepares the weights; empty if every weight is used unchanged."""
        part = self.before[0]
        if part is None or not self._prepares:
            return ""
        scope = Scope(part, set(), of_weights=True)
        lines: list[str] = []
        for op in scope.ops:
            last = op.attrs.get("last", ())
            assert isinstance(last, tuple)
            if op.callee:
                lines += self._bundle(op, scope)
            else:
                packs = Trait.PACKS in lookup(op.name, op.location).traits
                lines += [self._packing(op, scope) if packs else scope.op_line(op)]
                lines += [f"del {scope.names[op.operands[number].name]}" for number in last]  # type: ignore[index]
        used = {v.name for op in part.ops for v in op.operands} | {o.value.name for o in part.outputs}
        lines += [f"del {scope.use(i.value)}" for i in part.inputs if i.value.name not in used]
        return (
            f"def {self._prepare_name}(comm, weights):\n"
            + "".join(f"    {line}\n" for line in lines)
            + "    return weights\n\n\n"
        )

    def _packing(self, op: Op, scope: Scope) -> str:
        """Return the line that packs weights, which are then one object, under the name of the first."""
        code = torch_packing(op, [scope.use(v) for v in op.operands])
        return f"{scope.name(op.results[0])} = {code}"

    def _bundle(self, op: Op, scope: Scope) -> list[str]:
        """Return the lines that put the weights of a call, under their names in the callee, into a dictionary."""
        callee = self.callees[op.callee]
        last = {op.operands[number].name for number in op.attrs.get("last", ())}  # type: ignore[union-attr,index]
        entries = []
        for number, (name, operand) in enumerate(zip(callee.weights, op.operands, strict=True)):
            is_popped = operand.name in last and operand not in op.operands[number + 1 :]
            source = f"weights.pop({json.dumps(operand.name)})" if is_popped else scope.use(operand)
            entries.append(f"    {json.dumps(name)}: {source},")
        begin, end = (f"{callee.prepare}(comm, {{", "})") if callee.prepare else ("{", "}")
        key = bundle_key(op.results, callee)
        return [f"weights[{json.dumps(key)}] = {begin}", *entries, end]

    def prepare_sizes(self) -> str:
        """Return the Python function that computes values of sizes; empty if there is none."""
        part = self.before[1]
        if part is None:
            return ""
        scope = Scope(part, {*self.taken, *self.symbols})
        lines = [scope.op_line(op) for op in scope.ops]
        results = [
            f"attention.unless_all_true({scope.names[o.name]})"
            if o.name in self.masks and self.by_call
            else scope.names[o.name]
            for o in part.outputs
        ]
        return (
            f"def prepare_sizes({', '.join(['comm', 'weights', *self.symbols])}):\n"
            + "".join(f"    {line}\n" for line in lines)
            + f"    return [{', '.join(results)}]\n\n\n"
        )

    def _body(self) -> list[str]:
        scope, lines = self.scope, list[str]()
        for op in scope.ops:
            last, unused = ([*op.attrs.get(key, ())] for key in ("last", "unused"))  # type: ignore[misc]
            dead = [op.operands[number] for number in last]
            if op.callee:
                stage, kind, microbatch = (op.attrs.get(key) for key in TASK)
                lines += [f"comm.begin({stage}, {json.dumps(kind)}, {microbatch})"] if op.task else []
                callee = self.callees[op.callee]
                lines += [f"finite.enter({json.dumps(op.location or callee.name)})"] if self.checked else []
                lines.append(self._call(op, callee, dead))
                lines += ["finite.leave()"] if self.checked else []
                lines += ["comm.end()"] if op.task else []
                dead = []
            else:
                lines.append(scope.op_line(op))
                lines += self._check_lines(op) if self.checked else []
            dead += [op.results[number] for number in unused]
            if dead:
                lines.append(f"del {', '.join(scope.names[v.name] for v in dead)}")
            lines += [] if op.callee else self.clock_lines(op)
        return lines

    def _call(self, op: Op, callee: Callee, dead: Sequence[Value]) -> str:
        """Return the line of a call. It takes over the values that are `dead` after it."""
        of_call, constants = op.operands[: callee.arguments], op.operands[callee.arguments :]
        weights = [f"weights[{json.dumps(bundle_key(constants, callee))}]"] if constants else []
        arguments, moved = list[str](), set[Value]()
        for value in of_call:
            given = self.scope.use(value)
            if value in dead and value not in moved:
                moved.add(value)
                given = f"moved({given}, {given} := None)"
            arguments.append(given)
        if callee.as_list:
            arguments = [f"[{', '.join(arguments)}]"]
        return self.scope.line(op, f"{callee.name}({', '.join(['comm', *weights, *callee.symbols, *arguments])})")

    def _begin_checks(self) -> str:
        """Return the line that checks the inputs and the weights."""
        inputs = ", ".join(f"({json.dumps(v.name)}, {self.scope.names[v.name]})" for v in self.arguments)
        return f"    finite.begin([{inputs}], weights)\n"

    def _check_lines(self, op: Op) -> list[str]:
        """Return the line that checks the results of an op."""
        floats = [v for v in op.results if "float" in v.tensor.dtype]
        # A started op has no result yet.
        if not floats or Trait.STARTS in lookup(op.name, op.location).traits:
            return []
        names = ", ".join(f"%{v.name}" for v in op.results)
        what = f"{names} = {op.name}" + (f"  # {op.location}" if op.location else "")
        values = ", ".join(self.scope.names[v.name] for v in floats)
        return [f"finite.check(comm, {json.dumps(what)}, {values})"]

    def clock_lines(self, op: Op, scope: Scope | None = None) -> list[str]:
        """Return the lines after an op of a scope, by default that of this function, that record its end."""
        if self.clocked is None:
            return []
        scope = scope or self.scope
        fixed = {*(i.value.name for i in scope.function.inputs if is_constant(i)), *scope.numbers}
        plain = (replace(v, type=TensorType(v.tensor.shape, v.tensor.dtype)) for v in op.operands)
        own = replace(op, attrs=op.own_attrs, operands=tuple(plain))
        self.clocked.append(ClockedOp(own, tuple(v.name in fixed for v in op.operands)))
        return [f"clock({len(self.clocked) - 1})"]


def masks_of(ops: Iterable[Op], function: Function) -> set[str]:
    """Return the values of sizes of a function of which `ops` take None instead (`Code.mask`)."""
    users = [
        (v.name, not op.callee and n == lookup(op.name, op.location).code.mask and v.tensor.dtype == "bool")
        for op in ops
        for n, v in enumerate(op.operands)
    ]
    others = {name for name, may_be_none in users if not may_be_none}
    others |= {o.value.name for o in function.outputs}
    return {i.value.name for i in function.inputs if i.role == SIZED} - others


def bundle_key(values: Sequence[Value], callee: Callee) -> str:
    """Return the name of a call's weights, from the names of its `values` and of those in the callee."""
    return values[0].name.removesuffix(prepared_name("", callee.constants[0]))


def identifier(name: str, prefix: str) -> str:
    """Return a Python identifier for a name of a program, in ASCII: Python takes some other characters for these."""
    result = re.sub(r"\W", "_", name, flags=re.ASCII)
    return result if result.isidentifier() and not keyword.iskeyword(result) else f"{prefix}_{result}"


def comment(location: str) -> str:
    """Return the comment with a place in the model, on one line: Python ends lines at more characters than texts do."""
    shown = location if location.isprintable() else repr(location)
    return f"  # {shown}" if location else ""


def _needs_list(arguments: Collection[object]) -> bool:
    # Communicator and weights come before them.
    return len(arguments) + 2 > _MAX_ARGUMENTS
