"""Torch code of one step of several requests, from a rank's program that continues one sequence.

Ops that are parallel along the new positions run once, on the rows of all requests (`request_rows`). The others run for
each request, in functions of their own that `main` calls between them. Rows are joined and split where the two meet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Op, Output, Value
from distir_relax.layout import size_of, symbols_within
from distir_relax.layout.symbolic_size import Size
from distir_relax.lowering.emit.torch_function import TorchFunction
from distir_relax.lowering.ranked.one_sequence import SIZES
from distir_relax.lowering.ranked.request_rows import ROWS, RowOps, row_ops, rows_of
from distir_relax.ops import Trait, cached_states, lookup, torch_cached


@dataclass(slots=True)
class _Statement:
    """Lines of `main`, with the variables that they read and assign."""

    lines: list[str]
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RequestsFunction:
    """The text of a rank's step of several requests: ``main(comm, weights, requests, *inputs)``.

    Each of the `requests` is a `kernels.requests.Request`, whose ``sized`` values are the result of `prepare_sizes`.
    `emitted` is the code of the program for one sequence, whose names and weights it uses. `states` maps its inputs
    that are states to the outputs with their next values; `growing` are the dims along which states grow.
    """

    emitted: TorchFunction
    states: Mapping[str, str]
    growing: Mapping[str, int]
    rows: RowOps = field(init=False)
    regions: list[str] = field(default_factory=list)
    """The functions that run for each request."""
    statements: list[_Statement] = field(default_factory=list)
    lists: dict[str, str] = field(default_factory=dict)
    """The list of each request's part of a value, as an expression of `main`."""
    joined: set[str] = field(default_factory=set)
    """The values that are variables of `main`."""
    used_sizes: set[str] = field(default_factory=set)
    """The sizes in the code of `main`."""
    runs_once: bool = True
    """Whether all ops but views run once for all requests."""
    users: dict[str, set[str]] = field(default_factory=dict)
    """The first results of the ops that use a value, or the name of an output."""

    def __post_init__(self) -> None:
        sizes, shared = self.emitted.before[1], set(self.emitted.constants)
        if sizes is not None:
            shared |= row_ops(sizes, shared).shared
        self.rows = row_ops(self.emitted.function, shared)
        for output in self._outputs():
            if rows_of(output.value.tensor) is None:
                raise UnsupportedOpError(
                    f"expected outputs with one row per position, found {output.name} {output.value.tensor}"
                )
        self._generate()

    def text(self) -> str:
        """Return the Python functions."""
        emitted = self.emitted
        names = emitted.scope.names
        inputs = [names[v.name] for v in emitted.arguments if v.name not in self.states]
        outputs = [names[o.value.name] for o in self._outputs()]
        return (
            emitted.prepare()
            + emitted.prepare_sizes()
            + (f"SIZED = {self._sized_dims()!r}\nMASKS = {self._masks()!r}\n\n\n" if emitted.sized else "")
            + self._load_kernels()
            + "".join(f"{region}\n\n" for region in self.regions)
            + f"def main({', '.join(['comm', 'weights', 'requests', *inputs])}):\n"
            + ("" if emitted.clocked is None else "    clock(-1)\n")
            + "    sizes = rows(requests)\n"
            + ("    attending = attention.RequestsAttention(requests)\n" if self._cached_ops() else "")
            + "".join(f"    {name} = sum(sizes[{json.dumps(name)}])\n" for name in ROWS if name in self.used_sizes)
            + "".join(f"    {line}\n" for line in self._lines(outputs))
            + f"    return ({', '.join(outputs)}{',' * (len(outputs) == 1)})\n"
        )

    def _sized_dims(self) -> list[list[str]] | None:
        """Return which dims of each sized value have the new positions, or all; None if one depends otherwise on sizes.

        A value without such a dim is a number of positions, or computed from one.
        """
        found = [[_dim_kind(size) for size in value.tensor.shape] for value in self.emitted.sized]
        is_other = any(None in dims or not any(dims) for dims in found)
        return None if is_other else found  # type: ignore[return-value]

    def _load_kernels(self) -> str:
        """Generate the function that loads the kernels for caches; empty if there are none."""
        codes = [(lookup(op.name, op.location).code.cached_kernel, op) for op in self._cached_ops()]
        lines = dict.fromkeys(
            f"    {write([v.tensor for v in op.operands], op.attrs)}\n" for write, op in codes if write
        )
        return f"def load_kernels():\n{''.join(lines)}\n\n" if lines else ""

    def _cached_ops(self) -> list[Op]:
        return [op for op in self.emitted.function.ops if cached_states(op)]

    def _masks(self) -> list[int]:
        """Return which sized values may be None if all their elements are true."""
        return [number for number, value in enumerate(self.emitted.sized) if value.name in self.emitted.masks]

    def _outputs(self) -> list[Output]:
        return [output for output in self.emitted.function.outputs if output.name not in self.states.values()]

    def _lines(self, outputs: Sequence[str]) -> list[str]:
        """Return the lines of `main`; variables are deleted after their last use."""
        last = {name: n for n, statement in enumerate(self.statements) for name in statement.reads}
        lines: list[str] = []
        for number, statement in enumerate(self.statements):
            lines += statement.lines
            names = dict.fromkeys([*statement.reads, *statement.writes])
            dead = [name for name in names if last.get(name, number) == number and name not in outputs]
            lines += [f"del {', '.join(dead)}"] if dead else []
        return lines

    def _generate(self) -> None:
        """Generate `main`: ops that run for each request wait until one that runs once needs their results."""
        emitted, scope = self.emitted, self.emitted.scope
        for op in scope.ops:
            for value in op.operands:
                self.users.setdefault(value.name, set()).add(op.results[0].name)
        for output in self._outputs():
            self.users.setdefault(output.value.name, set()).add(f"output {output.name}")
        self.joined = {v.name for v in emitted.arguments} - set(self.states)
        for position, sized in enumerate(emitted.sized):
            self.lists[sized.name] = f"[r.sized[{position}] for r in requests]"
        waiting: list[Op] = []
        for op in scope.ops:
            runs_once = op.results[0].name in self.rows.once
            # All ranks communicate in one order only if such an op is alone in its function.
            is_alone = not runs_once and Trait.ON_COMMUNICATOR in lookup(op.name, op.location).traits
            runs_once |= bool(cached_states(op))
            produced = {v.name for other in waiting for v in other.results}
            if is_alone or (runs_once and any(v.name in produced for v in op.operands)):
                self._region(waiting)
                waiting.clear()
            if cached_states(op):
                self._cached(op)
                continue
            if runs_once:
                reads = [name for value in op.operands if (name := self._variable(value))]
                writes = [scope.names[v.name] for v in op.results]
                lines = scope.op_lines(op) + emitted.clock_lines(op)
                self.statements.append(_Statement(lines, reads, writes))
                self.used_sizes |= scope.sizes_in_code(op)
                self.joined.update(v.name for v in op.results)
                continue
            waiting.append(op)
            if is_alone:
                self._region(waiting)
                waiting.clear()
        self._region(waiting)
        self._region([], self._stores(self.lists.keys() | self.joined | set(self.states)))
        for output in self._outputs():
            self._variable(output.value)

    def _cached(self, op: Op) -> None:
        """Generate an op that runs for all requests in one call, with their states; it extends these."""
        states, operands, reads = cached_states(op), list[str](), list[str]()
        sized = [value.name for value in self.emitted.sized]
        for number, value in enumerate(op.operands):
            code, read = "", ""
            if number < states[0]:
                code = read = self._variable(value)
            elif number > states[-1] and value.name in sized:
                code = str(sized.index(value.name))
            elif number > states[-1]:
                code, read = self._each(value)
            operands.append(code)
            reads += [read] if read else []
        result = op.results[0]
        scope = self.emitted.scope
        lines = [scope.line(op, torch_cached(op, operands), op.results[:1]), *self.emitted.clock_lines(op)]
        self.statements.append(_Statement(lines, reads, [scope.names[result.name]]))
        self.joined.add(result.name)
        self.used_sizes |= scope.sizes_in_code(op)

    def _each(self, value: Value) -> tuple[str, str]:
        """Return the list of each request's part of a value, and the variable of `main` that it reads, if any."""
        if value.name in self.lists:
            code = self.lists[value.name]
            return code, code if code.isidentifier() else ""
        name = self.emitted.scope.names[value.name]
        if value.name not in self.joined:
            return f"[{name}] * len(requests)", ""
        rows = None if value.name in self.rows.shared else rows_of(value.tensor)
        split = f"{name}.split(sizes[{json.dumps(rows[1])}], {rows[0]})" if rows else ""
        return split or f"[{name}] * len(requests)", name

    def _variable(self, value: Value) -> str:
        """Return the variable of `main` with the rows of all requests, which are joined first; empty for a weight."""
        name = self.emitted.scope.names.get(value.name, "")
        if value.name in self.lists and value.name not in self.joined:
            rows, parts = rows_of(value.tensor), self.lists[value.name]
            reads = [parts] if parts.isidentifier() else []
            # A shared value has no rows: that of any request will do.
            code = f"join({parts}, {rows[0]})" if rows else f"({parts})[0]"
            self.statements.append(_Statement([f"{name} = {code}"], reads, [name]))
            self.joined.add(value.name)
        return name if value.name in self.joined else ""

    def _stores(self, values: Collection[str]) -> dict[str, Value]:
        """Return the states whose next value is one of `values`, by name, unless it is the state itself."""
        by_output = {output: state for state, output in self.states.items()}
        outputs = [o for o in self.emitted.function.outputs if o.name in by_output]
        return {
            by_output[o.name]: o.value for o in outputs if o.value.name in values and o.value.name != by_output[o.name]
        }

    def _region(self, ops: Sequence[Op], stores: Mapping[str, Value] | None = None) -> None:
        """Generate the function that runs ops for each request, and its call."""
        produced = {v.name: v for op in ops for v in op.results}
        stores = self._stores(produced) if stores is None else stores
        if not ops and not stores:
            return
        self.runs_once &= not stores and all(Trait.VIEW in lookup(op.name, op.location).traits for op in ops)
        emitted, scope = self.emitted, self.emitted.scope
        sized = [value.name for value in emitted.sized]
        buffered = self._buffered(ops)
        inner = {op.results[0].name for op in ops}
        used = dict.fromkeys(v for op in ops for v in op.operands if v.name not in produced)
        used |= dict.fromkeys(v for v in stores.values() if v.name not in produced)
        header, arguments, items, reads = list[str](), list[str](), list[str](), list[str]()
        symbols = set[str]().union(*map(scope.sizes_in_code, ops))
        symbols |= {"past"} if any(value.name in self.growing for value in used) else set()
        header += [f"{name} = request.{name}" for name in SIZES if name in symbols]
        for value in used:
            name = scope.names.get(value.name, "")
            if value.name in self.states:
                is_part = value.name in self.growing and value.name not in buffered
                part = f".narrow({self.growing[value.name]}, 0, past)" if is_part else ""
                header.append(f"{name} = request.states[{json.dumps(value.name)}]{part}")
            elif value.name in sized:
                header.append(f"{name} = request.sized[{sized.index(value.name)}]")
            elif value.name in self.lists or value.name in self.joined:
                item, read = self._each(value)
                arguments.append(name)
                items.append(item)
                reads += [read] if read else []
        results = [v for v in produced.values() if self.users.get(v.name, set()) - inner]
        lines = list(header)
        for op in ops:
            is_buffered = bool(op.operands) and buffered.get(op.operands[0].name) is op
            lines += scope.op_lines(op, is_buffered) + emitted.clock_lines(op)
        lines += [self._store(state, value) for state, value in stores.items() if state not in buffered]
        if results:
            lines.append(f"return {', '.join(scope.names[v.name] for v in results)}")
        function = f"request_{len(self.regions)}"
        self.regions.append(
            f"def {function}({', '.join(['comm', 'weights', 'request', *arguments])}):\n"
            + "".join(f"    {line}\n" for line in lines)
        )
        each = [f"{scope.names[v.name]}_each" for v in results]
        call = f"{function}(comm, weights, *each) for each in zip({', '.join(['requests', *items])}, strict=True)"
        if len(each) > 1:
            line = f"{', '.join(each)} = zip(*[{call}], strict=True)"
        else:
            line = f"{each[0]} = [{call}]" if each else f"[{call}]"
        self.statements.append(_Statement([line], reads, each))
        self.lists |= {v.name: name for v, name in zip(results, each, strict=True)}

    def _buffered(self, ops: Sequence[Op]) -> dict[str, Op]:
        """Return the ops that append the new elements of growing states to their buffers, by the names of the states.

        The next value of the state is the result, and nothing else reads the state in the same function.
        """
        found: dict[str, Op] = {}
        for op in ops:
            state = op.operands[0].name if op.operands else ""
            if state in self.growing and lookup(op.name, op.location).code.buffered:
                next_value = self._stores([v.name for v in op.results]).get(state)
                reads = [v for other in ops for v in other.operands if v.name == state]
                if next_value == op.results[0] and op.attrs["axis"] == self.growing[state] and len(reads) == 1:
                    found[state] = op
        return found

    def _store(self, state: str, value: Value) -> str:
        """Return the line that keeps the next value of a state."""
        target, name = f"request.states[{json.dumps(state)}]", self.emitted.scope.names[value.name]
        return (
            f"sequence.extend({target}, 0, {name}, {self.growing[state]})"
            if state in self.growing
            else f"{target} = {name}"
        )


def _dim_kind(size: Size) -> str | None:
    """Return ``new`` or ``all`` for the size of a dim with these positions, empty for a number, None for others."""
    symbols = {symbol.name: size_of(symbol) for symbol in symbols_within((size,))}
    if not symbols:
        return ""
    if symbols.keys() == {"new"}:
        return "new" if size == symbols["new"] else None
    is_all = symbols.keys() == {"new", "past"} and size == symbols["new"] + symbols["past"]
    return "all" if is_all else None
