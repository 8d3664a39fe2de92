"""Writes ops of the distributed stage: types are inferred device by device, once per distinct local program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distir_relax.ir import Attribute, Kinds, Op, PlacedType, Size, Value, fresh_name, mesh_kinds
from distir_relax.layout import DeviceMesh
from distir_relax.ops.table.spmd_inference import infer_placed


@dataclass(slots=True)
class PlacedEmitter:
    """Adds ops on all devices of `mesh`. `location` and `hint` (for names) hold for the ops that follow."""

    mesh: DeviceMesh
    taken: set[str]
    ops: list[Op] = field(default_factory=list)
    location: str = ""
    hint: str = "v"
    _written: dict[object, tuple[Value, list[Op], Value]] = field(default_factory=dict)
    """What `again` has written: from which value, by which ops, which value."""

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the mesh."""
        return self.mesh.devices

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Value | tuple[Value, ...]:
        """Add an op; its value, or the tuple of its values. Its results are named after `hint`."""
        results = tuple(Value(self.fresh(self.hint), kind) for kind in self.infer(name, operands, attrs))
        self.ops.append(Op(name, operands, results, attrs, self.location))
        return results[0] if len(results) == 1 else results

    def one(self, name: str, *operands: Value, **attrs: Attribute) -> Value:
        """Like `emit`, for an op of one result."""
        result = self.emit(name, *operands, **attrs)
        assert isinstance(result, Value)
        return result

    def on(self, devices: tuple[int, ...], name: str, *operands: Value, **attrs: Attribute) -> Value:
        """Like `one`, on some devices; each gives the op the operands that it holds. A `transfer` ends on them."""
        (kind,) = self.infer(name, operands, attrs, devices)
        result = Value(self.fresh(self.hint), kind)
        self.ops.append(Op(name, operands, (result,), attrs, self.location))
        return result

    def again(self, key: object, value: Value, write: Callable[[Value], Value]) -> Value:
        """What `write` makes of a value: its ops are written once for each `key` and type, and then copied.

        They may depend on nothing else, and take nothing but the value and what they make of it.
        """
        key = (key, value.type)
        if key not in self._written:
            first = len(self.ops)
            made = write(value)
            self._written[key] = value, self.ops[first:], made
            return made
        given, ops, end = self._written[key]
        copies = {given.name: value}
        for op in ops:
            results = tuple(Value(self.fresh(self.hint), v.type) for v in op.results)
            copies.update((v.name, copy) for v, copy in zip(op.results, results, strict=True))
            self.ops.append(Op(op.name, tuple(copies[v.name] for v in op.operands), results, op.attrs, self.location))
        return copies[end.name]

    def infer(
        self,
        name: str,
        operands: tuple[Value, ...],
        attrs: Mapping[str, Attribute],
        devices: tuple[int, ...] | None = None,
    ) -> tuple[PlacedType, ...]:
        """The result types on `devices`, by default all of them."""
        chosen = self.devices if devices is None else devices
        return infer_placed(name, [v.placed for v in operands], attrs, chosen, self.location)

    def fresh(self, name: str) -> str:
        """`name`, or a numbered variant of it when it is taken."""
        return fresh_name(name, self.taken)

    def by_index(self, axis: int, sizes: tuple[int, ...]) -> Size:
        """A number for each index along a mesh axis, as a number for each device."""
        return mesh_kinds(self.mesh, (axis,)).spread(sizes)


def merge_attrs(rows: list[dict[str, Attribute]], kinds: Kinds) -> dict[str, Attribute]:
    """Attributes of all kinds of devices as one: rank by rank where numbers differ."""
    return {key: _merge([row[key] for row in rows], kinds) for key in rows[0]}


def _merge(values: list[Attribute], kinds: Kinds) -> Attribute:
    # A nan is equal to none, and the same one for all.
    if all(v is values[0] or v == values[0] for v in values):
        return values[0]
    if all(isinstance(v, tuple) for v in values):
        return tuple(_merge(list(items), kinds) for items in zip(*values, strict=True))
    return kinds.spread([v for v in values if isinstance(v, int)])
