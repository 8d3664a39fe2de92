"""Types of the distributed stage: what an op gives on each device of a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, PlacedType, TensorType, Value, per_rank, print_devices
from distir_relax.ops.builder import infer
from distir_relax.ops.check import local_attrs, local_operands
from distir_relax.ops.registry import lookup


def placed(value: Value) -> PlacedType:
    """The type of a value of the distributed stage. Raises `VerificationError` for another."""
    if not isinstance(value.type, PlacedType):
        raise VerificationError(f"{value} lies on no devices: {value.type}")
    return value.type


def infer_placed(
    name: str,
    operands: Sequence[PlacedType],
    attrs: Mapping[str, Attribute],
    devices: tuple[int, ...],
    location: str = "",
) -> tuple[PlacedType, ...]:
    """The result types of op `name` on `devices`, each giving it the operands that it holds.

    Raises `VerificationError` when the operands do not fit the op on some device.
    """
    alike = lookup(name, location).role == "transfer" or all(k.devices == devices for k in operands)
    if alike and not differs(operands, attrs):
        types = infer(name, [k.local(0) for k in operands], attrs, location)
        return tuple(PlacedType(t.shape, t.dtype, devices) for t in types)
    found: dict[object, tuple[TensorType, ...]] = {}
    rows: list[tuple[TensorType, ...]] = []
    for index, types in enumerate(local_operands(name, operands, devices)):
        mine = local_attrs(attrs, index)
        key = (types, tuple(mine.items()))
        if key not in found:
            found[key] = infer(name, types, mine, location)
        rows.append(found[key])
    return tuple(joined(column, devices) for column in zip(*rows, strict=True))


def differs(operands: Sequence[PlacedType], attrs: Mapping[str, Any]) -> bool:
    """Whether a size of the operands or an attribute is given rank by rank."""
    return any(not isinstance(d, int) for k in operands for d in k.shape) or local_attrs(attrs, 0) != dict(attrs)


def joined(types: Sequence[TensorType], devices: tuple[int, ...]) -> PlacedType:
    """The local types of `devices` as one: sizes rank by rank where they differ."""
    sizes = tuple(per_rank(list(dim)) for dim in zip(*(t.shape for t in types), strict=True))
    return PlacedType(sizes, types[0].dtype, devices)


def result_devices(name: str, operands: Sequence[PlacedType], location: str = "") -> tuple[int, ...]:
    """The devices that an op runs on: those of its operands. Raises `VerificationError` naming them when they differ.

    A `transfer` has to be told where it goes.
    """
    if not operands or lookup(name, location).role == "transfer":
        raise VerificationError(f"{name} must be told its devices", location, "write them: %y @ {1} = " + f"{name}(…)")
    if len({k.devices for k in operands}) > 1:
        where = ", ".join(print_devices(k.devices) for k in operands)
        raise VerificationError(
            f"the operands of {name} lie on different devices: {where}", location, "send them to one place first"
        )
    return operands[0].devices
