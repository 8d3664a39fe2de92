"""Restriction of outputs to their last positions: scores of the next token are needed after the last one alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.incremental.roles import OpRoles, Positions, Roles, op_roles, restricted_attrs
from distir_relax.ir import CachedState, Function, Inline, Module, Op, Value, live_ops, required_ops
from distir_relax.ir.symbols import check_symbols, module_symbols
from distir_relax.layout import Guard, Symbol, assuming, size_of
from distir_relax.ops import Builder


@dataclass(frozen=True, slots=True)
class LastPositions:
    """Restrict the outputs along `sequence` to their last `count` positions; states stay as they are.

    `count` is a further size of the program, of 0 to all positions, typically 1. Ops that are parallel along the
    sequence are applied to the last positions of their operands, unless states need their results at all positions: so
    the classifier, and all that follows the attention of the last layer. Functions are inlined.

    Raises `DistIRError` if the program has no size `sequence`, has one called `count`, or an output's size only depends
    on the sequence.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    sequence: str = "new"
    count: str = "last"

    def run(self, module: Module) -> Module:
        """Return the program with these outputs."""
        symbols = module_symbols(module)
        check_symbols([self.sequence], symbols)
        if self.count in symbols:
            raise DistIRError(f"the program has a size {self.count!r}, the name of its number of last positions")
        sequence = symbols[self.sequence]
        length, count = size_of(sequence), size_of(Symbol(self.count, 0, sequence.high, 1))
        positions = Positions(sequence, length - count, count)
        guard = Guard(length - count, "<", 0, False)
        states = {record.output for record in module.records if isinstance(record, CachedState)}
        main = Inline().run(module).main
        builder = Builder.of(main)
        with assuming((*module.guards, guard)):
            last = _emit_last(main, states, positions, builder)
        outputs = [replace(output, value=last.get(output.name, output.value)) for output in main.outputs]
        function = builder.function(main.name, outputs)
        functions = (replace(function, ops=live_ops(function)),)
        return replace(module, functions=functions, records=(*module.records, guard))


def _emit_last(main: Function, states: Collection[str], positions: Positions, builder: Builder) -> dict[str, Value]:
    """Emit the last positions of the outputs that are along the sequence and no states; return them by output."""
    outputs = {o.name: o.value for o in main.outputs if o.name not in states}
    all_roles = {v.name: positions.roles(v.tensor, "new") for v in outputs.values()}
    wanted = {name: roles for name, roles in all_roles.items() if "new" in roles}
    ends = set(wanted)
    of_states = required_ops(main.ops, [o.value.name for o in main.outputs if o.name in states])
    whole = {v.name for op in of_states for v in op.results}
    steps: dict[str, OpRoles] = {}
    for op in reversed(main.ops):
        value = op.results[0]
        needed = wanted.get(value.name)
        if needed is None or (value.name in whole and _can_cut(value, needed, positions)):
            continue
        if (step := _step(op, needed, positions)) is not None:
            steps[value.name] = step
            for operand, roles in zip(op.operands, step.operands, strict=True):
                if any(roles):
                    wanted.setdefault(operand.name, roles)
    last: dict[str, Value] = {}
    for value in (i.value for i in main.inputs):
        if value.name in wanted and _can_cut(value, wanted[value.name], positions):
            last[value.name] = _cut(value, wanted[value.name], positions, builder)
    for op in main.ops:
        value = op.results[0]
        if (found := steps.get(value.name)) and _has_operands(op, found, wanted, last):
            parts = [last[v.name] if any(r) else v for v, r in zip(op.operands, found.operands, strict=True)]
            builder.location, builder.hint = op.location, value.name
            last[value.name] = builder.emit(op.name, *parts, **restricted_attrs(op, found, positions, parts))
        elif value.name in wanted and _can_cut(value, wanted[value.name], positions):
            last[value.name] = _cut(value, wanted[value.name], positions, builder)
    for name, value in outputs.items():
        if value.name in ends - last.keys():
            raise DistIRError(f"the output {name!r} has no dim of size {positions.sequence}: {value.tensor}")
    return {name: last[value.name] for name, value in outputs.items() if value.name in ends}


def _step(op: Op, roles: Roles, positions: Positions) -> OpRoles | None:
    """Return the roles of an op that computes the last positions of its result from those of its operands alone."""
    if op.callee or len(op.results) > 1:
        return None
    found = op_roles(op, 0, roles, positions)
    is_alone = found is not None and found.is_parallel and all("all" not in r for r in found.operands)
    return found if is_alone else None


def _has_operands(op: Op, found: OpRoles, wanted: Mapping[str, Roles], last: Collection[str]) -> bool:
    along = [(v.name, roles) for v, roles in zip(op.operands, found.operands, strict=True) if any(roles)]
    return bool(along) and all(name in last and wanted[name] == roles for name, roles in along)


def _can_cut(value: Value, roles: Roles, positions: Positions) -> bool:
    return all(
        positions.is_sequence(size) for size, role in zip(value.tensor.shape, roles, strict=True) if role == "new"
    )


def _cut(value: Value, roles: Roles, positions: Positions, builder: Builder) -> Value:
    dims = tuple(dim for dim, role in enumerate(roles) if role == "new")
    builder.hint = f"{value.name}.last"
    result: Value = builder.emit(
        "strided_slice", value, axes=dims, begin=(positions.past,) * len(dims), end=(positions.total,) * len(dims),
        strides=(1,) * len(dims),
    )  # fmt: skip
    return result
