"""Type checks of the verifier: the results of an op have the types that its entry infers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Attribute,
    DeviceEquivalence,
    DTensorType,
    Module,
    Op,
    PerRank,
    PlacedType,
    TensorType,
    Value,
    at_rank,
    classify_devices,
    print_devices,
)
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.entry_checks import check_facets, check_operands
from distir_relax.ops.table.rank_checks import check_ranks
from distir_relax.ops.table.table import TABLE, Table, lookup


class TableCheck:
    """The op table's checks for `ir.verify`."""

    def op(self, op: Op, stage: str) -> None:
        """Raise `VerificationError` unless the results of `op` follow from its operands.

        In the distributed stage they are checked on each device.
        """
        right = TABLE.derived(_right_before)
        # Equal numbers of different types, such as 1 and True, are distinguished by their text.
        attrs = repr(sorted(op.attrs.items())) if op.attrs else ""
        key = (op.name, stage, tuple([v.type for v in op.operands]), attrs, tuple([v.type for v in op.results]))
        if key not in right:
            self._check(op, stage)
            right.add(key)

    def ranks(self, module: Module) -> None:
        """Raise `VerificationError` unless the programs of the ranks match: see `check_ranks`."""
        check_ranks(module)

    def _check(self, op: Op, stage: str) -> None:
        if stage != "distributed":
            split = stage in ("global", "sharded")
            _compare(op, [_tensor(v) for v in op.operands], [_tensor(v) for v in op.results], op.attrs, split)
            return
        if lookup(op.name, op.location).semantics.partial_eval:
            return
        operands, results = [v.placed for v in op.operands], [v.placed for v in op.results]
        if not results:
            raise VerificationError(f"{op.name} gives nothing, expected at least one result", op.location)
        devices = results[0].devices
        if any(kind.devices != devices for kind in results):
            raise VerificationError(f"the results of {op.name} are on different devices", op.location)
        _check_ends(op, [k.devices for k in operands], devices)
        for index in device_kinds(op.name, operands, op.attrs, devices, results).firsts:
            types = local_operands(op.name, operands, devices, index)
            _compare(op, list(types), [r.local(index) for r in results], local_attrs(op.attrs, index))


check = TableCheck()
"""The op table's part of verification."""


def _right_before(table: Table) -> set[object]:
    """Return the cache of op instances that passed: blocks repeat, and passes keep most ops.

    Failures are not cached, so that an error has the location of its op.
    """
    return set()


def device_kinds(
    name: str,
    operands: Sequence[PlacedType],
    attrs: Mapping[str, Attribute],
    devices: tuple[int, ...],
    results: Sequence[PlacedType] = (),
) -> DeviceEquivalence:
    """Group an op's `devices` by equal local operands, operand types and attributes."""
    for key, value in attrs.items():
        if any(len(number.values) != len(devices) for number in numbers_by_device(value)):
            raise VerificationError(f"{name} is on {len(devices)} devices, the attribute {key} is not for so many")
    columns = [d.values for kind in results for d in kind.shape if isinstance(d, PerRank)]
    columns += [number.values for value in attrs.values() for number in numbers_by_device(value)]
    for kind in operands:
        sizes = [d.values for d in kind.shape if isinstance(d, PerRank)]
        if kind.devices == devices or Trait.TRANSFER in lookup(name).traits:
            columns += sizes
            continue
        places = {device: index for index, device in enumerate(kind.devices)}
        columns.append(tuple([device in places for device in devices]))
        columns += [tuple([values[places[d]] if d in places else 0 for d in devices]) for values in sizes]
    return classify_devices(tuple(columns), len(devices))


def local_operands(
    name: str, operands: Sequence[PlacedType], devices: tuple[int, ...], index: int
) -> tuple[TensorType, ...]:
    """Return the types of the operands that the device at `index` of an op's result devices holds.

    A `transfer` takes its operand from the device at the same index in the operand's set.
    """
    if Trait.TRANSFER in lookup(name).traits:
        return tuple(kind.local(index) for kind in operands)
    device = devices[index]
    return tuple(kind.local(kind.devices.index(device)) for kind in operands if device in kind.devices)


def local_attrs(attrs: Mapping[str, Attribute], index: int) -> dict[str, Attribute]:
    """Return the attributes for the device at `index` of the op's device set."""
    return {key: _local_attribute(value, index) for key, value in attrs.items()}


def _local_attribute(value: Attribute, index: int) -> Attribute:
    if isinstance(value, PerRank):
        return at_rank(value, index)
    if isinstance(value, tuple):
        return tuple(_local_attribute(item, index) for item in value)
    return value


def numbers_by_device(value: Attribute) -> Iterator[PerRank]:
    """Iterate over the per-device numbers in an attribute."""
    if isinstance(value, PerRank):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from numbers_by_device(item)


def _check_ends(op: Op, sources: list[tuple[int, ...]], targets: tuple[int, ...]) -> None:
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
    check_operands(op.name, operands, attrs, op.location)
    expected = infer(op.name, operands, attrs, op.location)
    if tuple(results) != expected:
        names = ", ".join(str(v) for v in op.results)
        raise VerificationError(
            f"{op.name} gives ({', '.join(map(str, expected))}), but {names} is ({', '.join(map(str, results))})",
            op.location,
        )
    check_facets(op.name, operands, attrs, results, op.location, split)
