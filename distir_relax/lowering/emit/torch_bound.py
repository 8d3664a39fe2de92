"""Torch code that binds a step (`kernels.bound_step`): it adds the ops of functions to one that is prepared once."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from distir_relax.ir import TASK, Op, Value, fresh_name
from distir_relax.lowering.emit.torch_function import TorchFunction
from distir_relax.ops import Trait, lookup, torch_bound, torch_expression, torch_in_place, torch_kind, torch_native


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of a function that binds, and the values that they read."""

    lines: Sequence[str]
    reads: Sequence[Value]


def bind_function(emitted: TorchFunction) -> str:
    """Return the Python function that adds a function's ops to a step; empty if some op cannot be part of one.

    It has the results and the arguments of the function itself, but `step` and all symbols after the weights. Its name
    is ``bind`` for ``main``, ``bind_`` and the name for others.
    """
    ops = emitted.remaining_ops()
    if not all(op.callee or only_computes(emitted, op) for op in ops):
        return ""
    statements = [_call(emitted, op) if op.callee else _computed(emitted, op) for op in ops]
    arguments = emitted.arguments()
    inputs = {v.name for v in arguments}
    variables = inputs | {v.name for op in ops for v in op.results}
    kept = {o.value.name for o in emitted.function.outputs} | (inputs if emitted.name == "main" else set())
    lines = freed(emitted, statements, variables - kept)
    return emitted.definition(bind_name(emitted.name), ["step", *emitted.all_symbols], lines)


def bind_name(name: str) -> str:
    """Return the name of the Python function that binds the one called `name`."""
    return "bind" if name == "main" else f"bind_{name}"


def only_computes(emitted: TorchFunction, op: Op) -> bool:
    """Return whether an op changes no operand, and no part of it goes on later, unless a step knows how."""
    entry = lookup(op.name, op.location)
    may_start = Trait.STARTS not in entry.traits or bool(entry.code.bound)
    return may_start and not torch_in_place(op, emitted.operands(op))


def step_code(emitted: TorchFunction, op: Op) -> str:
    """Return the expression that adds an op, which is not a call, to the step, and gives its results."""
    operands = emitted.operands(op)
    if packed := emitted.packed.get(op.results[0].name):
        return f"weights[{json.dumps(packed)}].bind(step, {', '.join(emitted.unpacked(op))})"
    # A mask of sizes may be None.
    constants = {*emitted.numbers.values(), *(emitted.names[name] for name in emitted.masks)}
    return op_code(op, operands, constants)


def op_code(op: Op, operands: Sequence[str], constants: Collection[str] = ()) -> str:
    """Return the expression that adds an op to the step, from those of its operands, of which some are constants."""
    entry = lookup(op.name, op.location)
    if code := torch_bound(op, operands):
        return code
    tensors = [code for code in dict.fromkeys(operands) if code not in constants]
    # The parameters of the function have the names of variables; the others are weights.
    used = {code for code in tensors if code.isidentifier()}
    names = {code: code if code in used else fresh_name("weight", used) for code in tensors}
    parameters = f" {', '.join(names.values())}" if names else ""
    function = f"lambda{parameters}: {torch_expression(op, [names.get(code, code) for code in operands])}"
    if Trait.VIEW in entry.traits and len(tensors) == 1:
        return f"step.view({function}, {tensors[0]})"
    given = f"({', '.join(tensors)}{',' * (len(tensors) == 1)})"
    results = [torch_kind(v.tensor) for v in op.results]
    places = {code: f"{{{n}}}" for n, code in enumerate(tensors)}
    native = torch_native(op, [places.get(code) or _constant(code) for code in operands])
    if native:
        return f"elementwise.bind(step, {json.dumps(native)}, {function}, {given}, {results[0]})"
    return f"step.{'python' if len(results) == 1 else 'several'}({', '.join([function, given, *results])})"


def freed(emitted: TorchFunction, statements: Sequence[Statement], ends: Collection[str]) -> list[str]:
    """Return the lines of statements; values that are among `ends` are deleted after their last use.

    Then their memory is free for others.
    """
    last = {v.name: number for number, statement in enumerate(statements) for v in statement.reads}
    lines: list[str] = []
    for number, statement in enumerate(statements):
        lines += statement.lines
        names = dict.fromkeys(v.name for v in statement.reads if last[v.name] == number and v.name in ends)
        lines += [f"del {', '.join(emitted.names[name] for name in names)}"] if names else []
    return lines


def _computed(emitted: TorchFunction, op: Op) -> Statement:
    return Statement([emitted.line(op, step_code(emitted, op))], [*op.operands, *op.results])


def _call(emitted: TorchFunction, op: Op) -> Statement:
    callee = emitted.callees[op.callee]
    line = emitted.call(op, bind_name(callee.name), ["step", *callee.all_symbols])
    stage, kind, microbatch = (op.attrs.get(key) for key in TASK)
    begin, end = f"lambda: comm.begin({stage}, {json.dumps(kind)}, {microbatch})", "comm.end"
    lines = [f"step.do({begin})", line, f"step.do({end})"] if op.task else [line]
    return Statement(lines, [*op.operands, *op.results])


def _constant(code: str) -> str:
    """Return a float32 constant of a native kernel; empty if `code` is no finite number."""
    try:
        value = float(code.strip("()"))
    except ValueError:
        return ""
    return f"T.float32({value!r})" if math.isfinite(value) else ""
