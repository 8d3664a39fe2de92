"""Builder of distributed programs: types are inferred device by device, once per distinct local program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distir_relax.ir import (
    Attribute,
    DeviceEquivalence,
    Op,
    PlacedType,
    Size,
    Value,
    fresh_name,
    mesh_classes,
)
from distir_relax.layout import DeviceMesh, SymbolicSize
from distir_relax.ops.table.spmd_inference import infer_placed


@dataclass(slots=True)
class SpmdBuilder:
    """Adds ops on all devices of `mesh`. `location` and `hint` (for names) apply to subsequent ops."""

    mesh: DeviceMesh
    taken: set[str]
    ops: list[Op] = field(default_factory=list)
    location: str = ""
    hint: str = "v"
    _memo: dict[object, tuple[Value, list[Op], Value]] = field(default_factory=dict)
    """Cache of `memoized`: operand, ops, and result."""

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the mesh."""
        return self.mesh.devices

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Value | tuple[Value, ...]:
        """Add an op; return its result or the tuple of its results, named after `hint`."""
        results = tuple(Value(self.fresh(self.hint), kind) for kind in self.infer(name, operands, attrs))
        self.ops.append(Op(name, operands, results, attrs, self.location))
        return results[0] if len(results) == 1 else results

    def one(self, name: str, *operands: Value, **attrs: Attribute) -> Value:
        """Like `emit`, for an op of one result."""
        result = self.emit(name, *operands, **attrs)
        assert isinstance(result, Value)
        return result

    def on(self, devices: tuple[int, ...], name: str, *operands: Value, **attrs: Attribute) -> Value:
        """Like `one`, on some devices, with the operands that each has. A `transfer` delivers to them."""
        (kind,) = self.infer(name, operands, attrs, devices)
        result = Value(self.fresh(self.hint), kind)
        self.ops.append(Op(name, operands, (result,), attrs, self.location))
        return result

    def memoized(self, key: object, value: Value, build: Callable[[Value], Value]) -> Value:
        """Return `build(value)`; its ops are built once for each `key` and type, and then copied.

        They may depend on nothing else, and their operands must be `value` or results of each other.
        """
        key = (key, value.type)
        if key not in self._memo:
            first = len(self.ops)
            result = build(value)
            self._memo[key] = value, self.ops[first:], result
            return result
        original, ops, original_result = self._memo[key]
        copies = {original.name: value}
        for op in ops:
            results = tuple(Value(self.fresh(self.hint), v.type) for v in op.results)
            copies.update((v.name, copy) for v, copy in zip(op.results, results, strict=True))
            self.ops.append(Op(op.name, tuple(copies[v.name] for v in op.operands), results, op.attrs, self.location))
        return copies[original_result.name]

    def infer(
        self,
        name: str,
        operands: tuple[Value, ...],
        attrs: Mapping[str, Attribute],
        devices: tuple[int, ...] | None = None,
    ) -> tuple[PlacedType, ...]:
        """Return the result types on `devices`, by default all of them."""
        target_devices = self.devices if devices is None else devices
        return infer_placed(name, [v.placed for v in operands], attrs, target_devices, self.location)

    def fresh(self, name: str) -> str:
        """Return `name`, or a numbered variant if it is taken."""
        return fresh_name(name, self.taken)

    def expand_by_index(self, axis: int, sizes: tuple[int, ...]) -> Size:
        """Convert one number per index along a mesh axis to one per device."""
        return mesh_classes(self.mesh, (axis,)).expand(sizes)


def merge_attrs(rows: list[dict[str, Attribute]], classes: DeviceEquivalence) -> dict[str, Attribute]:
    """Merge the attributes of all classes of devices; numbers that differ become a number per device."""
    return {key: _merge([row[key] for row in rows], classes) for key in rows[0]}


def _merge(values: list[Attribute], classes: DeviceEquivalence) -> Attribute:
    # A NaN equals no other, but is identical to itself.
    if all(v is values[0] or v == values[0] for v in values):
        return values[0]
    if all(isinstance(v, tuple) for v in values):
        return tuple(_merge(list(items), classes) for items in zip(*values, strict=True))
    return classes.expand([v for v in values if isinstance(v, (int, SymbolicSize))])
