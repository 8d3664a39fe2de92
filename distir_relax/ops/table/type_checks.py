"""The verifier's checks of an op: its results have the types that its entry infers, and the entry's facets apply.

Operands and attributes may come from a user or from a file. The torch expression of an entry determines the number of
operands; the functions of the entry determine which attributes are valid.
"""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Attribute,
    DTensorType,
    Module,
    Op,
    PlacedType,
    TensorType,
    Value,
    print_devices,
)
from distir_relax.ops.table.builder import infer, operand_error
from distir_relax.ops.table.entry import Trait, typical_costs
from distir_relax.ops.table.expression import check_expression, operand_count
from distir_relax.ops.table.rank_checks import check_ranks
from distir_relax.ops.table.spmd_inference import device_kinds, local_attrs, local_operands
from distir_relax.ops.table.table import TABLE, Table, lookup
from distir_relax.support.units import count


class TableCheck:
    """The op table's checks for `ir.verify`."""

    def op(self, op: Op, stage: str) -> None:
        """Raise `VerificationError` unless the results of `op` follow from its operands.

        In the distributed stage they are checked on each device.
        """
        verified = TABLE.derived(_verified_instances)
        # Equal numbers of different types, such as 1 and True, are distinguished by their text.
        attrs = repr(sorted(op.attrs.items())) if op.attrs else ""
        key = (op.name, stage, tuple([v.type for v in op.operands]), attrs, tuple([v.type for v in op.results]))
        if key not in verified:
            self._check(op, stage)
            verified.add(key)

    def ranks(self, module: Module) -> None:
        """Raise `VerificationError` unless the programs of the ranks match: see `check_ranks`."""
        check_ranks(module)

    def _check(self, op: Op, stage: str) -> None:
        own = not lookup(op.name, op.location).traits.isdisjoint({Trait.PACKS, Trait.FOR_EACH})
        if stage != "distributed" and not any(isinstance(v.type, PlacedType) for v in op.results):
            split = stage in ("global", "sharded")
            taken, given = ([x if own else x.plain for x in map(_tensor, vs)] for vs in (op.operands, op.results))
            _compare(op, taken, given, op.own_attrs, split)
            return
        if lookup(op.name, op.location).semantics.partial_eval:
            return
        operands, results = ([v.placed if own else v.placed.plain for v in vs] for vs in (op.operands, op.results))
        if not results:
            raise VerificationError(f"{op.name} gives nothing, expected at least one result", op.location)
        devices = results[0].devices
        if any(kind.devices != devices for kind in results):
            raise VerificationError(f"the results of {op.name} are on different devices", op.location)
        _check_transfer(op, [k.devices for k in operands], devices)
        for index in device_kinds(op.name, operands, op.attrs, devices, results).firsts:
            types = local_operands(op.name, operands, devices, index)
            _compare(op, list(types), [r.local(index) for r in results], local_attrs(op.attrs, index))


check = TableCheck()
"""The op table's part of verification."""


def _verified_instances(table: Table) -> set[object]:
    """Return the cache of op instances that passed: blocks repeat, and passes keep most ops.

    Failures are not cached, so that an error has the location of its op.
    """
    return set()


def _check_transfer(op: Op, sources: list[tuple[int, ...]], targets: tuple[int, ...]) -> None:
    """Raise `VerificationError` unless a `transfer` has one target per source and the two sets are disjoint."""
    if Trait.TRANSFER not in lookup(op.name).traits:
        return
    if len(sources[0]) != len(targets) or set(sources[0]) & set(targets):
        raise VerificationError(
            f"{op.name} goes from each device to one of as many others, found {print_devices(sources[0])} to "
            f"{print_devices(targets)}",
            op.location,
        )


def _tensor(value: Value) -> TensorType:
    """Return the tensor type of a value: in the sharded stage, the global one."""
    return value.dtensor.tensor if isinstance(value.type, DTensorType) else value.tensor


def _compare(
    op: Op,
    operands: list[TensorType],
    results: list[TensorType],
    attrs: Mapping[str, Attribute],
    split: bool = False,
) -> None:
    """Raise `VerificationError` unless the op has these results and its entry can be evaluated for these types.

    With `split`, evaluate its factor rule too, for programs that are not partitioned yet.
    """
    _check_count(op, operands, attrs)
    expected = infer(op.name, operands, attrs, op.location)
    if tuple(results) != expected:
        names = ", ".join(str(v) for v in op.results)
        raise VerificationError(
            f"{op.name} gives ({', '.join(map(str, expected))}), but {names} is ({', '.join(map(str, results))})",
            op.location,
        )
    try:
        check_expression(op.name, attrs, len(operands))
        entry = lookup(op.name, op.location)
        if split:
            entry.rule_for(operands, attrs, results)
        cost, arguments = entry.cost, typical_costs(operands, attrs, results)
        for facet in (cost.flops, cost.moved, cost.product, cost.cpu_product, cost.workspace, cost.cpu_workspace):
            if facet is not None:
                facet(*arguments)
    except Exception as error:
        raise operand_error(op.name, operands, attrs, f"{type(error).__name__}: {error}", op.location) from None


def _check_count(op: Op, operands: list[TensorType], attrs: Mapping[str, Attribute]) -> None:
    """Raise `VerificationError` unless the op takes this number of operands."""
    try:
        expected = operand_count(op.name, attrs)
    except Exception:  # attributes that do not fit the expression: `infer` and the facets say more
        return
    if expected is not None and expected != len(operands):
        raise VerificationError(f"{op.name} takes {count(expected, 'operand')}, found {len(operands)}", op.location)
