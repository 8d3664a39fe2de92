"""The builder of distributed programs: what each set of devices does, op by op, in the order of the schedule.

A program is one function per repeated part (a layer, a pipeline stage), called on the devices that run it. Each op
stands for all devices of its set, so the size of a program does not depend on how many there are.
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
    lay_out,
    on_devices,
    print_devices,
)
from distir_relax.layout import DTYPES, DeviceMesh
from distir_relax.ops.table.spmd_inference import infer_placed, result_devices

T = TypeVar("T")


class ProgramBuilder:
    """Builds a module of the distributed stage over `mesh`.

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
        self._kept: dict[int, object] = {}
        self._devices: dict[tuple[int, ...], tuple[int, ...]] = {}

    def function(self, name: str) -> FunctionBuilder:
        """A new function. Its devices are numbered from 0, unless it is the entry: those are the mesh's.

        Raises `VerificationError` when there is one of this name.
        """
        if name in self.functions:
            raise VerificationError(f"there is a function @{name} already")
        self.functions[name] = FunctionBuilder(self, name)
        return self.functions[name]

    def build(self, entry: str = "main") -> Module:
        """The module, `entry` first. Raises `VerificationError` when there is no such function."""
        if entry not in self.functions:
            raise VerificationError(f"there is no function @{entry} to enter by")
        order = sorted(self.functions, key=lambda name: name != entry)
        return Module("distributed", tuple(self.functions[name].function() for name in order), (self.mesh,))

    def devices(self, **where: int) -> tuple[int, ...]:
        """The devices of the mesh at these indices along its axes: ``devices(stage=1)``, all of them by default."""
        unknown = set(where) - set(self.mesh.axes)
        if unknown:
            raise PlacementError(f"the mesh has the axes {', '.join(self.mesh.axes)}, found {', '.join(unknown)}")
        return self.memo(
            ("devices", tuple(where.items())),
            lambda: tuple(at_indices(self.mesh, {self.mesh.axes.index(a): i for a, i in where.items()})),
        )

    def layout(self, shape: Sequence[int], dtype: str, placements: str) -> tuple[DTensorType, PlacedType]:
        """A global tensor laid out over the mesh, and what each of its devices holds.

        `placements` has one placement per mesh axis; ``At[i]`` is for tensors of one pipeline stage. A cut that is
        not given is balanced. Raises `PlacementError` where they do not fit.
        """
        key = ("layout", tuple(shape), dtype, placements)
        return self.memo(key, lambda: lay_out(tuple(shape), dtype, placements, self.mesh))

    def memo(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, made once for each `key`: types that are equal are one object."""
        found: T | None = self._types.get(key)
        if found is None:
            found = self._types[key] = make()
        return found

    def same(self, kind: PlacedType) -> PlacedType:
        """A type equal to `kind`, always the same object."""
        return self.memo(("kind", self.keep(kind)), lambda: self._first(kind))

    def _first(self, kind: PlacedType) -> PlacedType:
        devices = self._devices.setdefault(kind.devices, kind.devices)
        return self.memo(("same", kind.shape, kind.dtype, id(devices)), lambda: kind)

    def keep(self, item: object) -> int:
        """A number for an object that stays alive as long as the builder does."""
        self._kept[id(item)] = item
        return id(item)


class FunctionBuilder:
    """Builds one function; made by `ProgramBuilder.function`."""

    def __init__(self, program: ProgramBuilder, name: str) -> None:
        self.program = program
        self.name = name
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.outputs: list[Output] = []
        self._taken: set[str] = set()

    def input(
        self, name: str, shape: Sequence[Any], dtype: str, devices: tuple[int, ...] = (0,), role: str = "input"
    ) -> Value:
        """An input of local `shape` on each of `devices`; a dim may be a `PerRank`."""
        if dtype not in DTYPES:
            raise VerificationError(f"dtypes are {', '.join(DTYPES)}, found {dtype!r}", f"input {name}")
        key = ("type", tuple(shape), dtype, self.program.keep(devices))
        kind = self.program.memo(key, lambda: PlacedType(tuple(shape), dtype, devices))
        return self.like(name, kind, role)

    def like(self, name: str, kind: PlacedType, role: str = "input", layout: DTensorType | None = None) -> Value:
        """An input of a type."""
        value = Value(fresh_name(name, self._taken), self.program.same(kind))
        self.inputs.append(Input(value, role, "", layout))
        return value

    def tensor(self, name: str, shape: Sequence[int], dtype: str, placements: str, role: str = "input") -> Value:
        """An input that is a global tensor, of which each device gets its piece; for the entry function."""
        layout, kind = self.program.layout(shape, dtype, placements)
        return self.like(name, kind, role, layout)

    def emit(
        self, name: str, *operands: Value, devices: tuple[int, ...] | None = None, hint: str = "", **attrs: Attribute
    ) -> Any:
        """Add an op; its value, or the tuple of its values.

        It runs on `devices`, by default those of its operands. Raises `VerificationError` when the operands do not
        fit the op or lie apart.
        """
        key = (name, *(id(v.type) for v in operands), *attrs.items(), devices and self.program.keep(devices))
        kinds: tuple[PlacedType, ...] = self.program.memo(key, lambda: self._infer(name, operands, attrs, devices))
        results = tuple(Value(fresh_name(hint or name.rsplit(".", 1)[-1], self._taken), kind) for kind in kinds)
        self.ops.append(Op(name, operands, results, attrs))
        return results[0] if len(results) == 1 else results

    def send(self, value: Value, devices: tuple[int, ...], hint: str = "") -> Value:
        """`value` on `devices`: each device of its set sends to the one at the same place there."""
        result: Value = self.emit("send", value, devices=devices, hint=hint)
        return result

    def call(
        self, callee: FunctionBuilder, *operands: Value, devices: tuple[int, ...], hint: str = ""
    ) -> tuple[Value, ...]:
        """Run a function on `devices`, which stand for its 0, 1, 2, …; the values that it gives.

        Raises `VerificationError` when an operand is not what the function takes.
        """
        if len(operands) != len(callee.inputs):
            raise VerificationError(f"@{callee.name} takes {len(callee.inputs)} values, found {len(operands)}")
        number = self.program.keep(devices)
        for value, item in zip(operands, callee.inputs, strict=True):
            expected = self._outside(item.value, devices, number)
            if value.type is not expected and value.type != expected:
                raise VerificationError(
                    f"{item.value} of @{callee.name} is {expected} on {print_devices(devices)}, "
                    f"found {value}: {value.type}"
                )
        results = tuple(
            Value(fresh_name(f"{hint}{o.name}", self._taken), self._outside(o.value, devices, number))
            for o in callee.outputs
        )
        self.ops.append(Op(CALL, operands, results, {"callee": callee.name, "devices": devices}))
        return results

    def output(self, name: str, value: Value, shape: Sequence[int] = (), placements: str = "") -> None:
        """Name a value that the function gives. In the entry function `shape` and `placements` say how the pieces of
        the devices make up a global tensor."""
        layout = None
        if placements:
            layout, kind = self.program.layout(shape, value.placed.dtype, placements)
            if kind != value.type:
                raise PlacementError(f"output {name!r} would be {kind}, found {value.type}")
        self.outputs.append(Output(name, value, layout))

    def function(self) -> Function:
        """The function built so far."""
        return Function(self.name, tuple(self.inputs), tuple(self.ops), tuple(self.outputs))

    def _infer(
        self, name: str, operands: Sequence[Value], attrs: Mapping[str, Attribute], devices: tuple[int, ...] | None
    ) -> tuple[PlacedType, ...]:
        # The key of the memo has the numbers of these types, which must not be given to others.
        kinds = [v.placed for v in operands]
        for kind in kinds:
            self.program.keep(kind)
        found = infer_placed(name, kinds, attrs, devices or result_devices(name, kinds))
        return tuple(map(self.program.same, found))

    def _outside(self, value: Value, devices: tuple[int, ...], number: int) -> PlacedType:
        kind = value.placed
        return self.program.memo(
            (self.program.keep(kind), number), lambda: self.program.same(on_devices(kind, devices))
        )


def at_indices(mesh: DeviceMesh, fixed: Mapping[int, int]) -> list[int]:
    """The devices whose coordinates along some axes are fixed, in ascending order."""
    found = [0]
    for axis, size in enumerate(mesh.shape):
        if axis in fixed and not 0 <= fixed[axis] < size:
            raise PlacementError(f"axis {mesh.axes[axis]} of {mesh} has no index {fixed[axis]}")
        indices = (fixed[axis],) if axis in fixed else range(size)
        found = [device * size + i for device in found for i in indices]
    return found
