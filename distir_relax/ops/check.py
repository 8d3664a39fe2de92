"""The op table's part of verification: an op's results have the types that its entry infers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, Op, PerRank, PlacedType, TensorType, Untyped, Value, at_rank, print_devices
from distir_relax.ops.builder import infer
from distir_relax.ops.registry import lookup


def check(op: Op, stage: str) -> None:
    """Raise `VerificationError` unless the results of `op` follow from its operands; to be given to `ir.verify`.

    In the distributed stage this holds on each device.
    """
    if stage != "distributed":
        _compare(op, [_tensor(v) for v in op.operands], [_tensor(v) for v in op.results], op.attrs)
        return
    if lookup(op.name, op.location).mixed:
        return
    results = [_placed(v) for v in op.results]
    _check_ends(op, [_placed(v).devices for v in op.operands], results[0].devices)
    seen = set()
    for index, types in enumerate(local_operands(op.name, [_placed(v) for v in op.operands], results[0].devices)):
        found, attrs = tuple(r.local(index) for r in results), local_attrs(op.attrs, index)
        key = (types, found, tuple(map(str, attrs.values())))
        if key not in seen:
            seen.add(key)
            _compare(op, list(types), list(found), attrs)


def local_operands(
    name: str, operands: Sequence[PlacedType], devices: tuple[int, ...]
) -> Iterator[tuple[TensorType, ...]]:
    """On each of the devices of an op's results, the types of the operands that it has there: those it holds.

    A `transfer` takes its operand from the device at the same place in the operand's set.
    """
    if lookup(name).role == "transfer":
        for index in range(len(devices)):
            yield tuple(kind.local(index) for kind in operands)
        return
    places = [{device: index for index, device in enumerate(kind.devices)} for kind in operands]
    for device in devices:
        yield tuple(k.local(place[device]) for k, place in zip(operands, places, strict=True) if device in place)


def local_attrs(attrs: Mapping[str, Attribute], index: int) -> dict[str, Attribute]:
    """The attributes that hold for the device at `index` of the op's device set."""
    return {key: _local_attribute(value, index) for key, value in attrs.items()}


def _local_attribute(value: Attribute, index: int) -> Attribute:
    if isinstance(value, PerRank):
        return at_rank(value, index)
    if isinstance(value, tuple):
        return tuple(_local_attribute(item, index) for item in value)
    return value


def _check_ends(op: Op, sources: list[tuple[int, ...]], targets: tuple[int, ...]) -> None:
    """A `transfer` has a target for each source, and no device waits for itself."""
    if lookup(op.name).role != "transfer":
        return
    if len(sources[0]) != len(targets) or set(sources[0]) & set(targets):
        raise VerificationError(
            f"{op.name} goes from each device to one of as many others, found {print_devices(sources[0])} to "
            f"{print_devices(targets)}",
            op.location,
        )


def _placed(value: Value) -> PlacedType:
    if not isinstance(value.type, PlacedType):
        raise VerificationError(f"{value} lies on no devices: {value.type}")
    return value.type


def _tensor(value: Value) -> TensorType:
    if isinstance(value.type, PlacedType):
        raise VerificationError(f"{value} lies on several devices: {value.type}")
    if isinstance(value.type, Untyped):
        raise VerificationError(f"{value} has no type yet", hint="infer_types finds the types that a text left out")
    return value.type if isinstance(value.type, TensorType) else value.type.tensor


def _compare(op: Op, operands: list[TensorType], results: list[TensorType], attrs: Mapping[str, Attribute]) -> None:
    expected = infer(op.name, operands, attrs, op.location)
    if tuple(results) != expected:
        names = ", ".join(str(v) for v in op.results)
        raise VerificationError(
            f"{op.name} gives ({', '.join(map(str, expected))}), but {names} is ({', '.join(map(str, results))})",
            op.location,
        )
