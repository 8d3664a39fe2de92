"""Restriction of outputs to their last positions: scores of the next token are needed after the last one alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.incremental.roles import OpRoles, Positions, Roles, op_roles, restricted_attrs
from distir_relax.ir import CachedState, Function, Inline, Module, Op, Output, Value, live_ops, producers
from distir_relax.ir.symbols import check_symbols, module_symbols
from distir_relax.layout import Guard, Symbol, assuming, size_of
from distir_relax.ops import Builder


@dataclass(frozen=True, slots=True)
class LastPositions:
    """Restrict the outputs along `sequence` to their last `count` positions; states stay as they are.

    `count` is a further size of the program, of 0 to all positions, typically 1. Ops that are parallel along the
    sequence, and have one operand along it, are applied to the last positions of that operand: the classifier and the
    norm before it. Functions are inlined.

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
            outputs = [
                output if output.name in states else replace(output, value=_last(main, output, positions, builder))
                for output in main.outputs
            ]
        function = builder.function(main.name, [(o.name, o.value) for o in outputs])
        functions = (replace(function, ops=live_ops(function)),)
        return replace(module, functions=functions, records=(*module.records, guard))


def _last(main: Function, output: Output, positions: Positions, builder: Builder) -> Value:
    """Emit the last positions of an output; return the output's value if it is along no sequence."""
    value, roles = output.value, positions.roles(output.value.tensor, "new")
    if "new" not in roles:
        return value
    made_by = producers(main)
    chain: list[tuple[Op, OpRoles, int]] = []
    # Where the chain may begin: at a dim of the sequence alone.
    begin = (value, roles, 0) if _is_sliceable(value, roles, positions) else None
    while (op := made_by.get(value.name)) is not None and (step := _step(op, value, roles, positions)) is not None:
        found, number = step
        chain.append((op, found, number))
        value, roles = op.operands[number], found.operands[number]
        if _is_sliceable(value, roles, positions):
            begin = (value, roles, len(chain))
    if begin is None:
        raise DistIRError(f"the output {output.name!r} has no dim of size {positions.sequence}: {output.value.tensor}")
    value, roles, count = begin
    dims = tuple(dim for dim, role in enumerate(roles) if role == "new")
    builder.hint = f"{value.name}.last"
    result: Value = builder.emit(
        "strided_slice", value, axes=dims, begin=(positions.past,) * len(dims), end=(positions.total,) * len(dims),
        strides=(1,) * len(dims),
    )  # fmt: skip
    for op, found, number in reversed(chain[:count]):
        operands = [result if i == number else v for i, v in enumerate(op.operands)]
        builder.location, builder.hint = op.location, op.results[0].name
        result = builder.emit(op.name, *operands, **restricted_attrs(op, found, positions, operands))
    return result


def _is_sliceable(value: Value, roles: Roles, positions: Positions) -> bool:
    return all(
        positions.is_sequence(size) for size, role in zip(value.tensor.shape, roles, strict=True) if role == "new"
    )


def _step(op: Op, value: Value, roles: Roles, positions: Positions) -> tuple[OpRoles, int] | None:
    """Return the roles of the op that makes a value, and its one operand along the sequence; None without one."""
    if op.callee or len(op.results) > 1:
        return None
    found = op_roles(op, op.results.index(value), roles, positions)
    if found is None or not found.is_parallel:
        return None
    along = [number for number, r in enumerate(found.operands) if any(r)]
    return (found, along[0]) if len(along) == 1 and "all" not in found.operands[along[0]] else None
