"""SPMD type inference: local operands, attributes and result types of an op on each device (distributed stage)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Attribute,
    DeviceEquivalence,
    PerRank,
    PlacedType,
    TensorType,
    at_rank,
    classify_devices,
    print_devices,
)
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.table import lookup


def infer_placed(
    name: str,
    operands: Sequence[PlacedType],
    attrs: Mapping[str, Attribute],
    devices: tuple[int, ...],
    location: str = "",
) -> tuple[PlacedType, ...]:
    """Return the result types of op `name` on `devices`, each with the operands that it holds.

    Raises `VerificationError` if the operands do not fit the op on some device.
    """
    same_devices = Trait.TRANSFER in lookup(name, location).traits or all(k.devices == devices for k in operands)
    if same_devices and not differs(operands, attrs):
        types = infer(name, [k.local(0) for k in operands], attrs, location)
        return tuple(PlacedType(t.shape, t.dtype, devices, t.form) for t in types)
    kinds = device_kinds(name, operands, attrs, devices)
    rows = [
        infer(name, local_operands(name, operands, devices, index), local_attrs(attrs, index), location)
        for index in kinds.firsts
    ]
    if any([(len(t.shape), t.dtype) for t in row] != [(len(t.shape), t.dtype) for t in rows[0]] for row in rows):
        raise VerificationError(f"{name} gives tensors of another number of dims on some devices", location)
    return tuple(joined(column, kinds, devices) for column in zip(*rows, strict=True))


def differs(operands: Sequence[PlacedType], attrs: Mapping[str, Any]) -> bool:
    """Return whether a size of the operands or an attribute differs by rank."""
    return any(isinstance(d, PerRank) for k in operands for d in k.shape) or local_attrs(attrs, 0) != dict(attrs)


def joined(types: Sequence[TensorType], kinds: DeviceEquivalence, devices: tuple[int, ...]) -> PlacedType:
    """Combine the local types of the classes of `devices` into one, with sizes per rank where they differ."""
    sizes = tuple(kinds.expand(dim) for dim in zip(*(t.shape for t in types), strict=True))
    return PlacedType(sizes, types[0].dtype, devices, types[0].form)


def result_devices(name: str, operands: Sequence[PlacedType], location: str = "") -> tuple[int, ...]:
    """Return the devices of an op: those of its operands. Raise `VerificationError` if they differ.

    A `transfer` specifies its devices itself.
    """
    if not operands or Trait.TRANSFER in lookup(name, location).traits:
        raise VerificationError(f"{name} must name its devices", location, "write them: %y @ {1} = " + f"{name}(…)")
    if len({k.devices for k in operands}) > 1:
        where = ", ".join(print_devices(k.devices) for k in operands)
        raise VerificationError(
            f"the operands of {name} are on different devices: {where}", location, "send them to one place first"
        )
    return operands[0].devices


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
