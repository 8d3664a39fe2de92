"""Printer of program text. `parser.parse` reads it back to the same program.

Each op is one line: results with their types, the op, its operands, its attributes, and after ``#`` its location in the
user's model. The grammar is at the end of ``docs/ir.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

from distir_relax.ir.program import CALL, Attribute, Function, Module, Op, Output, Value, placements_of
from distir_relax.ir.symbols import module_symbols
from distir_relax.ir.types import DTensorType, PerRank, Untyped, print_devices
from distir_relax.layout import Symbol, print_placements

Note = Callable[[str, Value], str]
"""Remark to print after a value, given its function's name and the value."""


def print_module(module: Module, note: Note | None = None) -> str:
    """Print a module. `note` may add a remark to each value's line, after the location; the parser skips it."""
    lines = [f"module @{module.stage} {{"]
    lines += [f"  mesh[{i}] = {mesh}" for i, mesh in enumerate(module.meshes)]
    lines += [f"  {_symbol(symbol)}" for symbol in module_symbols(module).values()]
    lines += [f"  guard {guard}{_remark(guard.location, '')}" for guard in module.guards]
    if module.ranks:
        lines.append(f"  ranks = ({', '.join('@' + name for name in module.ranks)},)")
    for function in module.functions:
        lines += ["  " + line for line in print_function(function, note).splitlines()]
    return "\n".join([*lines, "}"]) + "\n"


def print_function(function: Function, note: Note | None = None) -> str:
    """Print one function."""
    lines = [f"func @{function.name}("]
    for item in function.inputs:
        text = f"  {item.role} {_definition(item.value)}{_layout(item.layout)},"
        lines.append(text + _remark(item.location, note(function.name, item.value) if note else ""))
    lines.append(") {")
    mine = partial(note, function.name) if note else None
    lines += ["  " + print_op(op, mine) for op in function.ops]
    outputs = ", ".join(f"{json.dumps(o.name)}: {o.value}{_layout(o.layout)}{_role(o)}" for o in function.outputs)
    return "\n".join([*lines, f"  return {outputs}", "}"])


def print_op(op: Op, note: Callable[[Value], str] | None = None) -> str:
    """Print one op; `note` may add a remark to its first result."""
    results = ", ".join(map(_definition, op.results))
    operands = ", ".join(map(str, op.operands))
    if op.callee:
        devices = f" on {print_devices(op.devices)}" if op.devices is not None else ""
        text = f"{results} = {CALL} @{op.callee}({operands}){devices}{_attributes({**op.task, **op.execution})}"
    else:
        text = f"{results} = {op.name}({operands}){_attributes(op.attrs)}"
    return text + _remark(op.location, note(op.results[0]) if note and op.results else "")


def print_op_names(op: Op) -> str:
    """Print one op without types and attributes: ``%y = all_reduce(%h)  # model.py:12``."""
    operands = ", ".join(map(str, op.operands))
    return f"{', '.join(map(str, op.results))} = {op.name}({operands}){_remark(op.location, '')}"


def print_attribute(value: Attribute) -> str:
    """Print one attribute: a Python literal, or ``[a|b]`` for one number per device; placements are text."""
    if isinstance(value, PerRank):
        return f"[{value}]"
    if placements := placements_of(value):
        return json.dumps(print_placements(placements))
    if isinstance(value, tuple):
        inner = ", ".join(map(print_attribute, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value)


def _symbol(symbol: Symbol) -> str:
    return f"size {symbol} = {symbol.low}..{'' if symbol.high is None else symbol.high} typically {symbol.typical}"


def _attributes(attrs: Mapping[str, Attribute]) -> str:
    inner = ", ".join(f"{key}={print_attribute(value)}" for key, value in attrs.items())
    return f" {{{inner}}}" if inner else ""


def _definition(value: Value) -> str:
    if not isinstance(value.type, Untyped):
        return f"{value}: {value.type}"
    return f"{value} @ {print_devices(value.type.devices)}" if value.type.devices else str(value)


def _layout(layout: DTensorType | None) -> str:
    return f" as {layout}" if layout else ""


def _role(output: Output) -> str:
    return f" {output.role} of {json.dumps(output.of)}" if output.role else ""


def _remark(location: str, note: str) -> str:
    parts = [part for part in (location, f"; {note}" if note else "") if part]
    return f"  # {' '.join(parts)}" if parts else ""
