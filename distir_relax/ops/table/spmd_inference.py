"""SPMD type inference: result types of an op on each device of a set (distributed stage)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, DeviceEquivalence, PlacedType, TensorType, print_devices
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.table import lookup
from distir_relax.ops.table.type_checks import device_kinds, local_attrs, local_operands


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
        return tuple(PlacedType(t.shape, t.dtype, devices) for t in types)
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
    return any(not isinstance(d, int) for k in operands for d in k.shape) or local_attrs(attrs, 0) != dict(attrs)


def joined(types: Sequence[TensorType], kinds: DeviceEquivalence, devices: tuple[int, ...]) -> PlacedType:
    """Combine the local types of the classes of `devices` into one, with sizes per rank where they differ."""
    sizes = tuple(kinds.expand(dim) for dim in zip(*(t.shape for t in types), strict=True))
    return PlacedType(sizes, types[0].dtype, devices)


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
