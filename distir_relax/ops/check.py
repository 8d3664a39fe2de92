"""The op table's part of verification: an op's results have the types that its entry infers."""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.errors import VerificationError
from distir_relax.ir import Attribute, Op, PerRank, PlacedType, TensorType, Value, at_rank
from distir_relax.ops.builder import infer


def check(op: Op, stage: str) -> None:
    """Raise `VerificationError` unless the results of `op` follow from its operands; to be given to `ir.verify`.

    In the distributed stage this holds on each device.
    """
    if stage == "distributed":
        for device in _devices(op):
            attrs = local_attrs(op.attrs, device[1])
            _compare(op, [_local(v, device) for v in op.operands], [_local(v, device) for v in op.results], attrs)
    else:
        _compare(op, [_tensor(v) for v in op.operands], [_tensor(v) for v in op.results], op.attrs)


def local_attrs(attrs: Mapping[str, Attribute], index: int) -> dict[str, Attribute]:
    """The attributes that hold for the device at `index` of the op's device set."""
    return {key: _local_attribute(value, index) for key, value in attrs.items()}


def _local_attribute(value: Attribute, index: int) -> Attribute:
    if isinstance(value, PerRank):
        return at_rank(value, index)
    if isinstance(value, tuple):
        return tuple(_local_attribute(item, index) for item in value)
    return value


def _devices(op: Op) -> list[tuple[int, int]]:
    """The distinct (device, index) pairs to check: one for each different local program."""
    kinds = [v.type for v in (*op.operands, *op.results) if isinstance(v.type, PlacedType)]
    devices = kinds[0].devices if kinds else ()
    seen: dict[object, tuple[int, int]] = {}
    for index, device in enumerate(devices):
        key = (tuple(k.local(index) for k in kinds), tuple(map(str, local_attrs(op.attrs, index).values())))
        seen.setdefault(key, (device, index))
    return list(seen.values())


def _local(value: Value, device: tuple[int, int]) -> TensorType:
    assert isinstance(value.type, PlacedType)
    return value.type.local(device[1])


def _tensor(value: Value) -> TensorType:
    if isinstance(value.type, PlacedType):
        raise VerificationError(f"{value} lies on several devices: {value.type}")
    return value.type if isinstance(value.type, TensorType) else value.type.tensor


def _compare(op: Op, operands: list[TensorType], results: list[TensorType], attrs: Mapping[str, Attribute]) -> None:
    expected = infer(op.name, operands, attrs, op.location)
    if tuple(results) != expected:
        names = ", ".join(str(v) for v in op.results)
        raise VerificationError(
            f"{op.name} gives ({', '.join(map(str, expected))}), but {names} is ({', '.join(map(str, results))})",
            op.location,
        )
