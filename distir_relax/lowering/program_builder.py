"""Builder of distributed programs: the ops of each device set, in the order of the schedule.

A program has one function per repeated part (a layer, a pipeline stage), called on the devices that run it. Each op
stands for all devices of its set, so the size of a program does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from distir_relax.errors import PlacementError, VerificationError
from distir_relax.ir import (
    CALL,
    Attribute,
    DTensorType,
    Function,
    Input,
    Module,
    Op,
    Output,
    PlacedType,
    Value,
    fresh_name,
    make_layout,
    print_devices,
    remap_devices,
)
from distir_relax.layout import DTYPES, DeviceMesh
from distir_relax.ops.table.spmd_inference import infer_placed, result_devices

T = TypeVar("T")


class ProgramBuilder:
    """Build a module of the distributed stage over `mesh`.

    ::

        program = ProgramBuilder(DeviceMesh((2,), ("stage",)))
        dense = program.function("dense")
        x, w = dense.input("x", (4, 8), "float32"), dense.input("w", (8, 8), "float32")
        dense.output("h", dense.emit("nn.relu", dense.emit("matmul", x, w)))
        main = program.function("main")
        ...
        module = program.build()
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.functions: dict[str, FunctionBuilder] = {}
        self._types: dict[object, Any] = {}
        self._alive: dict[int, object] = {}
        self._devices: dict[tuple[int, ...], tuple[int, ...]] = {}

    def function(self, name: str) -> FunctionBuilder:
        """Add a function. Its devices are numbered from 0, except for the entry, which has those of the mesh.

        Raises `VerificationError` if there is one of this name.
        """
        if name in self.functions:
            raise VerificationError(f"function @{name} already exists")
        self.functions[name] = FunctionBuilder(self, name)
        return self.functions[name]

    def build(self, entry: str = "main") -> Module:
        """Return the module, `entry` first. Raises `VerificationError` if there is no such function."""
        if entry not in self.functions:
            raise VerificationError(f"there is no entry function @{entry}")
        order = sorted(self.functions, key=lambda name: name != entry)
        return Module("distributed", tuple(self.functions[name].function() for name in order), (self.mesh,))

    def devices(self, **where: int) -> tuple[int, ...]:
        """Return the devices of the mesh at these indices of its axes: ``devices(stage=1)``; all by default."""
        unknown = set(where) - set(self.mesh.axes)
        if unknown:
            raise PlacementError(f"the mesh has the axes {', '.join(self.mesh.axes)}, found {', '.join(unknown)}")
        return self.cached(
            ("devices", tuple(where.items())),
            lambda: tuple(at_indices(self.mesh, {self.mesh.axes.index(a): i for a, i in where.items()})),
        )

    def layout(self, shape: Sequence[int], dtype: str, placements: str) -> tuple[DTensorType, PlacedType]:
        """Return the type of a global tensor over the mesh, and that of its shards.

        `placements` has one placement per mesh axis; ``At[i]`` is for tensors of one pipeline stage. A cut without
        sizes is balanced. Raises `PlacementError` if they are invalid.
        """
        key = ("layout", tuple(shape), dtype, placements)
        return self.cached(key, lambda: make_layout(tuple(shape), dtype, placements, self.mesh))

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, cached by `key`: equal types are one object."""
        result: T | None = self._types.get(key)
        if result is None:
            result = self._types[key] = make()
        return result

    def intern(self, kind: PlacedType) -> PlacedType:
        """Return the one object for all types equal to `kind`."""
        return self.cached(("kind", self.pin(kind)), lambda: self._canonical(kind))

    def _canonical(self, kind: PlacedType) -> PlacedType:
        devices = self._devices.setdefault(kind.devices, kind.devices)
        return self.cached(("same", kind.shape, kind.dtype, id(devices)), lambda: kind)

    def pin(self, item: object) -> int:
        """Return an id for an object, which stays alive as long as the builder."""
        self._alive[id(item)] = item
        return id(item)


class FunctionBuilder:
    """Build one function; created by `ProgramBuilder.function`."""

    def __init__(self, program: ProgramBuilder, name: str) -> None:
        self.program = program
        self.name = name
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.outputs: list[Output] = []
        self._names: set[str] = set()

    def input(
        self, name: str, shape: Sequence[Any], dtype: str, devices: tuple[int, ...] = (0,), role: str = "input"
    ) -> Value:
        """Add an input of local `shape` on each of `devices`; a dim may be a `PerRank`."""
        if dtype not in DTYPES:
            raise VerificationError(f"dtypes are {', '.join(DTYPES)}, found {dtype!r}", f"input {name}")
        key = ("type", tuple(shape), dtype, self.program.pin(devices))
        kind = self.program.cached(key, lambda: PlacedType(tuple(shape), dtype, devices))
        return self.like(name, kind, role)

    def like(self, name: str, kind: PlacedType, role: str = "input", layout: DTensorType | None = None) -> Value:
        """Add an input of a type."""
        value = Value(fresh_name(name, self._names), self.program.intern(kind))
        self.inputs.append(Input(value, role, "", layout))
        return value

    def tensor(self, name: str, shape: Sequence[int], dtype: str, placements: str, role: str = "input") -> Value:
        """Add an input of the entry that is a global tensor; each device gets its shard."""
        layout, kind = self.program.layout(shape, dtype, placements)
        return self.like(name, kind, role, layout)

    def emit(
        self, name: str, *operands: Value, devices: tuple[int, ...] | None = None, hint: str = "", **attrs: Attribute
    ) -> Any:
        """Add an op; return its value, or the tuple of its values.

        It runs on `devices`, by default those of its operands. Raises `VerificationError` if the operands do not fit
        the op or are on different devices.
        """
        key = (name, *(id(v.type) for v in operands), *attrs.items(), devices and self.program.pin(devices))
        kinds: tuple[PlacedType, ...] = self.program.cached(key, lambda: self._infer(name, operands, attrs, devices))
        results = tuple(Value(fresh_name(hint or name.rsplit(".", 1)[-1], self._names), kind) for kind in kinds)
        self.ops.append(Op(name, operands, results, attrs))
        return results[0] if len(results) == 1 else results

    def send(self, value: Value, devices: tuple[int, ...], hint: str = "") -> Value:
        """Send `value` to `devices`: each device of its set sends to the one at the same position."""
        result: Value = self.emit("send", value, devices=devices, hint=hint)
        return result

    def call(
        self, callee: FunctionBuilder, *operands: Value, devices: tuple[int, ...], hint: str = ""
    ) -> tuple[Value, ...]:
        """Call a function on `devices`, which take the roles of its devices 0, 1, 2, …; return its results.

        Raises `VerificationError` if an operand does not have the type of the function's input.
        """
        if len(operands) != len(callee.inputs):
            raise VerificationError(f"@{callee.name} takes {len(callee.inputs)} values, found {len(operands)}")
        number = self.program.pin(devices)
        for value, item in zip(operands, callee.inputs, strict=True):
            expected = self._type_at_call(item.value, devices, number)
            if value.type is not expected and value.type != expected:
                raise VerificationError(
                    f"{item.value} of @{callee.name} is {expected} on {print_devices(devices)}, "
                    f"found {value}: {value.type}"
                )
        results = tuple(
            Value(fresh_name(f"{hint}{o.name}", self._names), self._type_at_call(o.value, devices, number))
            for o in callee.outputs
        )
        self.ops.append(Op(CALL, operands, results, {"callee": callee.name, "devices": devices}))
        return results

    def output(self, name: str, value: Value, shape: Sequence[int] = (), placements: str = "") -> None:
        """Add an output. In the entry, `shape` and `placements` are the global tensor that the shards make up."""
        layout = None
        if placements:
            layout, kind = self.program.layout(shape, value.placed.dtype, placements)
            if kind != value.type:
                raise PlacementError(f"output {name!r} would be {kind}, found {value.type}")
        self.outputs.append(Output(name, value, layout))

    def function(self) -> Function:
        """Return the function built so far."""
        return Function(self.name, tuple(self.inputs), tuple(self.ops), tuple(self.outputs))

    def _infer(
        self, name: str, operands: Sequence[Value], attrs: Mapping[str, Attribute], devices: tuple[int, ...] | None
    ) -> tuple[PlacedType, ...]:
        # The cache key contains the ids of these types, so they must stay alive.
        kinds = [v.placed for v in operands]
        for kind in kinds:
            self.program.pin(kind)
        types = infer_placed(name, kinds, attrs, devices or result_devices(name, kinds))
        return tuple(map(self.program.intern, types))

    def _type_at_call(self, value: Value, devices: tuple[int, ...], number: int) -> PlacedType:
        kind = value.placed
        return self.program.cached(
            (self.program.pin(kind), number), lambda: self.program.intern(remap_devices(kind, devices))
        )


def at_indices(mesh: DeviceMesh, fixed: Mapping[int, int]) -> list[int]:
    """Return the devices with fixed coordinates along some axes, in ascending order."""
    devices = [0]
    for axis, size in enumerate(mesh.shape):
        if axis in fixed and not 0 <= fixed[axis] < size:
            raise PlacementError(f"axis {mesh.axes[axis]} of {mesh} has no index {fixed[axis]}")
        indices = (fixed[axis],) if axis in fixed else range(size)
        devices = [device * size + i for device in devices for i in indices]
    return devices
