"""Torch code of one step of several requests: a program whose ops run once, or for each (`BatchRequests`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.errors import UnsupportedOpError
from distir_relax.executable.batch_requests import CALLED, is_for_each
from distir_relax.executable.request_rows import ROWS, rows_of
from distir_relax.ir import EACH, Function, Input, Op, Output, Value
from distir_relax.layout import size_of, symbols_within
from distir_relax.layout.symbolic_size import Size
from distir_relax.lowering.emit.torch_function import Scope, TorchFunction, masks_of
from distir_relax.lowering.ranked.one_sequence import SIZES
from distir_relax.ops import ForRequests, Trait, growing_states, lookup, torch_for_requests


@dataclass(slots=True)
class RequestsFunction:
    """The text of a rank's step of several requests: ``main(comm, weights, requests, *inputs)``.

    Each of the `requests` is a `kernels.requests.Request`, whose ``sized`` values are the result of `prepare_sizes`.
    `emitted` is the code of what runs once, and `each` are the functions that it calls for each request. `states` maps
    its inputs that are states to the outputs with their next values; `growing` are the dims along which states grow.
    """

    emitted: TorchFunction
    each: Mapping[str, Function]
    states: Mapping[str, str]
    growing: Mapping[str, int]
    used: set[str] = field(init=False)
    """The values that ops of what runs once use, or that are outputs other than states."""
    kept: dict[str, str] = field(init=False)
    """The states by the names of their next values."""
    masks: set[str] = field(init=False)
    """The values of sizes that may be None instead, if all their elements are true."""

    def __post_init__(self) -> None:
        scope, function = self.emitted.scope, self.emitted.function
        for output in self._outputs():
            if rows_of(output.value.tensor) is None:
                raise UnsupportedOpError(
                    f"expected outputs with one row per position, found {output.name} {output.value.tensor}"
                )
        for number, value in enumerate(self.emitted.sized):
            scope.names[value.name] = f"[r.sized[{number}] for r in requests]"
        scope.names |= {state: f"[r.states[{json.dumps(state)}] for r in requests]" for state in self.states}
        self.used = {v.name for op in function.ops for v in op.operands} | {o.value.name for o in self._outputs()}
        calls = [op for op in scope.ops if is_for_each(op)]
        once = (op for op in scope.ops if not is_for_each(op))
        self.masks = masks_of([*once, *(op for call in calls for op in self.each[call.callee].ops)], function)
        by_output = {output: state for state, output in self.states.items()}
        self.kept = {o.value.name: by_output[o.name] for o in function.outputs if o.name in by_output}

    @property
    def runs_once(self) -> bool:
        """Whether all ops but views run once for all requests."""
        calls = [op for op in self.emitted.scope.ops if is_for_each(op)]
        ops = [op for call in calls for op in Scope(self.each[call.callee], set()).ops]
        is_view = all(Trait.VIEW in lookup(op.name, op.location).traits for op in ops)
        return is_view and not any(v.name in self.kept for call in calls for v in call.results)

    def text(self) -> str:
        """Return the Python functions."""
        emitted, scope = self.emitted, self.emitted.scope
        inputs = [scope.names[v.name] for v in emitted.arguments if v.name not in self.states]
        outputs = [scope.names[o.value.name] for o in self._outputs()]
        regions, lines = list[str](), list[str]()
        for op in scope.ops:
            if is_for_each(op):
                regions.append(self._region(op))
                lines.append(self._call(op))
            elif growing_states(op):
                code = torch_for_requests(op, self._of_requests(op))
                lines += [scope.line(op, code, op.results[:1]), *emitted.clock_lines(op)]
            else:
                lines += [scope.op_line(op), *emitted.clock_lines(op)]
            dead = [op.operands[number] for number in op.attrs.get("last", ())]  # type: ignore[union-attr,index]
            dead += [v for v in op.results if v.name not in self.used and v.name not in self.kept]
            lines += [f"del {', '.join(scope.names[v.name] for v in dead)}"] if dead else []
        symbols = set[str]().union(*(scope.sizes_in_code(op) for op in scope.ops))
        return (
            emitted.prepare()
            + emitted.prepare_sizes()
            + (f"SIZED = {self._sized_dims()!r}\nMASKS = {self._masks()!r}\n\n\n" if emitted.sized else "")
            + self._load_kernels()
            + "".join(f"{region}\n\n" for region in regions)
            + f"def main({', '.join(['comm', 'weights', 'requests', *inputs])}):\n"
            + ("" if emitted.clocked is None else "    clock(-1)\n")
            + "    sizes = rows(requests)\n"
            + ("    attending = attention.RequestsAttention(requests)\n" if self._attending_ops() else "")
            + "".join(f"    {name} = sum(sizes[{json.dumps(name)}])\n" for name in ROWS if name in symbols)
            + "".join(f"    {line}\n" for line in lines)
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
        kernels = ((lookup(op.name, op.location).kernel(ForRequests), op) for op in self._attending_ops())
        lines = dict.fromkeys(
            f"    {kernel.load([v.tensor for v in op.operands], op.attrs)}\n" for kernel, op in kernels if kernel
        )
        return f"def load_kernels():\n{''.join(lines)}\n\n" if lines else ""

    def _attending_ops(self) -> list[Op]:
        return [op for op in self.emitted.function.ops if growing_states(op)]

    def _masks(self) -> list[int]:
        """Return which sized values may be None if all their elements are true."""
        return [number for number, value in enumerate(self.emitted.sized) if value.name in self.masks]

    def _outputs(self) -> list[Output]:
        return [output for output in self.emitted.function.outputs if output.name not in self.states.values()]

    def _of_requests(self, op: Op) -> list[str]:
        """Return the operands of an op that takes the states of all requests, which it finds by name."""
        states, sized = growing_states(op), [value.name for value in self.emitted.sized]
        return [
            "" if n in states else str(sized.index(v.name)) if v.name in sized else self.emitted.scope.use(v)
            for n, v in enumerate(op.operands)
        ]

    def _call(self, op: Op) -> str:
        """Return the line that calls a function for each request."""
        scope = self.emitted.scope
        pairs = zip(self.each[op.callee].inputs, op.operands, strict=True)
        items = [
            scope.names[v.name] if v.tensor.form == EACH else f"[{scope.use(v)}] * len(requests)"
            for item, v in pairs if self._is_argument(item)
        ]  # fmt: skip
        results = [scope.names[v.name] for v in self._returned(op)]
        call = f"{_name(op)}(comm, weights, *each) for each in zip({', '.join(['requests', *items])}, strict=True)"
        if len(results) > 1:
            return f"{', '.join(results)} = zip(*[{call}], strict=True)"
        return f"{results[0]} = [{call}]" if results else f"[{call}]"

    def _is_argument(self, item: Input) -> bool:
        """Return whether an input of a function for each request is passed, rather than found in the request."""
        return item.role == "input" and item.value.name not in self.states

    def _returned(self, op: Op) -> list[Value]:
        """Return the results of a call that are not kept in requests alone."""
        return [v for v in op.results if v.name in self.used or v.name not in self.kept]

    def _region(self, call: Op) -> str:
        """Return the function that runs ops for a request."""
        function = self.each[call.callee]
        scope, sized = Scope(function, set(self.emitted.taken)), [value.name for value in self.emitted.sized]
        values = {v.name: o.value for v, o in zip(call.results, function.outputs, strict=True)}
        stores = {self.kept[name]: value for name, value in values.items() if name in self.kept}
        buffered = {op.operands[0].name for op in scope.ops if op.attrs.get("into") == 0}
        symbols = set[str]().union(*map(scope.sizes_in_code, scope.ops))
        symbols |= {"past"} if any(i.value.name in self.growing for i in function.inputs) else set()
        lines = [f"{name} = request.{name}" for name in SIZES if name in symbols]
        for item in function.inputs:
            name, variable = item.value.name, scope.names[item.value.name]
            if name in self.states:
                is_part = name in self.growing and name not in buffered
                part = f".narrow({self.growing[name]}, 0, past)" if is_part else ""
                lines.append(f"{variable} = request.states[{json.dumps(name)}]{part}")
            elif name in sized:
                lines.append(f"{variable} = request.sized[{sized.index(name)}]")
        for op in scope.ops:
            lines += [scope.op_line(op), *self.emitted.clock_lines(op, scope)]
        lines += [self._store(key, scope.names[v.name]) for key, v in stores.items() if key not in buffered]
        if returned := [scope.names[values[v.name].name] for v in self._returned(call)]:
            lines.append(f"return {', '.join(returned)}")
        arguments = [scope.names[i.value.name] for i in function.inputs if self._is_argument(i)]
        return f"def {_name(call)}({', '.join(['comm', 'weights', 'request', *arguments])}):\n" + "".join(
            f"    {line}\n" for line in lines
        )

    def _store(self, state: str, name: str) -> str:
        """Return the line that keeps the next value of a state."""
        target = f"request.states[{json.dumps(state)}]"
        return (
            f"sequence.extend({target}, 0, {name}, {self.growing[state]})"
            if state in self.growing
            else f"{target} = {name}"
        )


def _name(call: Op) -> str:
    return f"request_{call.callee.rpartition(CALLED)[2]}"


def _dim_kind(size: Size) -> str | None:
    """Return ``new`` or ``all`` for the size of a dim with these positions, empty for a number, None for others."""
    symbols = {symbol.name: size_of(symbol) for symbol in symbols_within((size,))}
    if not symbols:
        return ""
    if symbols.keys() == {"new"}:
        return "new" if size == symbols["new"] else None
    is_all = symbols.keys() == {"new", "past"} and size == symbols["new"] + symbols["past"]
    return "all" if is_all else None
