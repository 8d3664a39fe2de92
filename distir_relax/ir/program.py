"""Programs: ``Module > Function > Op > Value``, straight-line and in static single assignment form.

Everything is a frozen dataclass; a pass builds a new program. A module is at exactly one stage:

===========  ==============  ============================================  =====================
stage        types           new at this stage                             created by
===========  ==============  ============================================  =====================
global       `TensorType`    the user's model                              frontends
sharded      `DTensorType`   layouts of all values, `redistribute` ops     `sharding.propagate`
distributed  `PlacedType`    device sets, explicit communication           `lowering.to_distir`
ranked       `TensorType`    one function per distinct rank                `lowering.project`
executable   `TensorType`    what runs once and in each call, packed       `executable.Hoist`
                             weights, the memory of results
===========  ==============  ============================================  =====================

In the distributed stage program order is the schedule: a device runs its ops one at a time, in this order. An op
`CALL` runs another function of the module, whose devices 0, 1, ... map to the devices of the call, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.errors import VerificationError
from distir_relax.ir.records import Record
from distir_relax.ir.types import DTensorType, PerRank, PlacedType, TensorType, Type, Untyped
from distir_relax.layout import DeviceMesh, Guard, Placement
from distir_relax.support.units import count

STAGES = ("global", "sharded", "distributed", "ranked", "executable")
ROLES = ("input", "parameter", "constant", "state", "sized")

CALL = "call"
"""The op that calls a function; its attributes are `callee` and `devices`, to which the callee's 0, 1, 2, ... map.

A pipeline task also has the attributes `stage`, `kind` (one of `KINDS`), and `microbatch`."""

TASK = ("stage", "kind", "microbatch")
"""The attributes of a call that is a pipeline task; passes preserve them."""

EXECUTION = ("by", "into", "last", "unused")
"""Attributes of an op in the executable stage: its kernel, where its result is written, and what is freed after it.

``by`` is the kernel of its entry, if it is not the reference expression (`ops.table.kernel`). ``into`` is the operand
whose memory the result takes, ``last`` are the operands that are used for the last time, and ``unused`` the results
that nothing uses; all by number."""

PLACEMENTS = "placements"
"""The attribute of an op that gives a value a layout: a placement for each mesh axis."""

KINDS = ("F", "I", "W")
"""Kinds of tasks: forward, gradients of inputs, gradients of weights."""

WAIT = "wait"
"""The op that waits for the stream that computes its operand; an op names its stream in the attribute `stream`."""

# Maximum length of an op's repr.
_SHOWN = 240

Attribute = int | float | bool | str | None | PerRank | Placement | tuple["Attribute", ...]


def placements_of(value: Attribute) -> tuple[Placement, ...]:
    """Return an attribute that has placements; empty for another."""
    items = value if isinstance(value, tuple) else ()
    placements = tuple(item for item in items if isinstance(item, Placement))
    return placements if len(placements) == len(items) else ()


def fresh_name(name: str, names: set[str]) -> str:
    """Return `name`, or ``name_1``, ``name_2``, ... if it is used; add the result to `names`."""
    candidate, number = name, 0
    while candidate in names:
        number += 1
        candidate = f"{name}_{number}"
    names.add(candidate)
    return candidate


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor, defined once: by a function's input or by an op."""

    name: str
    type: Type

    @property
    def tensor(self) -> TensorType:
        """The type of a value of one device; `VerificationError` for another."""
        if isinstance(self.type, TensorType):
            return self.type
        raise VerificationError(f"{self} is not a tensor of one device: {self.type}")

    @property
    def local(self) -> TensorType:
        """The type on one device: of several, the first. `VerificationError` for a value of the sharded stage."""
        return self.type.local(0) if isinstance(self.type, PlacedType) else self.tensor

    @property
    def dtensor(self) -> DTensorType:
        """The type of a value of the sharded stage; `VerificationError` for another."""
        if isinstance(self.type, DTensorType):
            return self.type
        raise VerificationError(f"{self} is not laid out over a mesh: {self.type}")

    @property
    def placed(self) -> PlacedType:
        """The type of a value of the distributed stage; `VerificationError` for another, or where it has none yet."""
        if isinstance(self.type, PlacedType):
            return self.type
        hint = "infer_types infers its type" if isinstance(self.type, Untyped) else ""
        raise VerificationError(f"{self} is not placed on devices: {self.type}", hint=hint)

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True, repr=False)
class Op:
    """One operation. `name` is its key in the op table; `location` is its place in the user's model."""

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    location: str = ""

    def __repr__(self) -> str:
        results = ", ".join(f"{value}: {value.type}" for value in self.results)
        text = f"<op {results} = {self.name}({', '.join(map(str, self.operands))})"
        text += f" {dict(self.attrs)}" if self.attrs else ""
        return (f"{text[:_SHOWN]} ..." if len(text) > _SHOWN else text) + ">"

    @property
    def callee(self) -> str:
        """The function that a call runs; empty for other ops."""
        return str(self.attrs["callee"]) if self.name == CALL else ""

    @property
    def devices(self) -> tuple[int, ...] | None:
        """The devices that a call runs on; None for all devices, as outside the distributed stage."""
        devices = self.attrs.get("devices") if self.name == CALL else None
        assert devices is None or isinstance(devices, tuple)
        return devices  # type: ignore[return-value]

    @property
    def task(self) -> dict[str, Attribute]:
        """The attributes of a call that identify a pipeline task; empty for other ops."""
        return {key: self.attrs[key] for key in TASK if key in self.attrs} if self.name == CALL else {}

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout that the op gives a value (`PLACEMENTS`); empty without one."""
        return placements_of(self.attrs.get(PLACEMENTS))

    @property
    def execution(self) -> dict[str, Attribute]:
        """The attributes that say how the op is executed (`EXECUTION`)."""
        return {key: self.attrs[key] for key in EXECUTION if key in self.attrs}

    @property
    def own_attrs(self) -> Mapping[str, Attribute]:
        """The attributes that say what the op computes: without those of its execution."""
        return {key: x for key, x in self.attrs.items() if key not in EXECUTION} if self.execution else self.attrs

    @property
    def task_name(self) -> str:
        """The name of a task: ``1F0`` is the forward of microbatch 0 on stage 1; empty for other ops."""
        return "".join(map(str, self.task.values()))


@dataclass(frozen=True, slots=True)
class Input:
    """A function's input. `role`: input, parameter, constant, or state (updated by the program).

    In the executable stage an input of role ``sized`` is a value that was computed for the sizes of a call.

    `location` is where the user declared it. `layout` is the layout of the global tensor that it is a shard of, if
    known, in the distributed stage."""

    value: Value
    role: str = "input"
    location: str = ""
    layout: DTensorType | None = None


GRADIENT_ROLE, NEXT_ROLE = "gradient", "next"
"""The roles of outputs."""


@dataclass(frozen=True, slots=True)
class Output:
    """A function's output, with the name that the user sees; `layout` as for an `Input`.

    An output with a `role` is the gradient by an input, or its next value: ``gradient`` or ``next``, and `of` is the
    name of that input.
    """

    name: str
    value: Value
    layout: DTensorType | None = None
    role: str = ""
    of: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Function:
    """Inputs, ops in program order, outputs."""

    name: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]

    @property
    def gradients(self) -> dict[str, Output]:
        """The outputs that are gradients, by the inputs by which they are."""
        return {output.of: output for output in self.outputs if output.role == GRADIENT_ROLE}

    @property
    def next_values(self) -> dict[str, Output]:
        """The outputs that are next values of inputs, by these."""
        return {output.of: output for output in self.outputs if output.role == NEXT_ROLE}

    def __repr__(self) -> str:
        sizes = count(len(self.inputs), "input"), count(len(self.ops), "op"), count(len(self.outputs), "output")
        return f"<function @{self.name}: {', '.join(sizes)}>"


@dataclass(frozen=True, slots=True, repr=False)
class Module:
    """Functions at one stage. `ranks` (ranked and executable stages) names the function of each rank.

    `records` are findings of passes. They are not part of the program: comparison ignores them.
    """

    stage: str
    functions: tuple[Function, ...]
    meshes: tuple[DeviceMesh, ...] = ()
    ranks: tuple[str, ...] = ()
    records: tuple[Record, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        meshes = f" on {', '.join(map(str, self.meshes))}" if self.meshes else ""
        ranks = f"{count(len(self.ranks), 'rank')}, " if self.ranks else ""
        ops = sum(len(function.ops) for function in self.functions)
        sizes = f"{ranks}{count(len(self.functions), 'function')}, {count(ops, 'op')}"
        return f"<{self.stage} module{meshes}: {sizes}; print_module(...) is its text>"

    @property
    def main(self) -> Function:
        """The entry function."""
        return self.functions[0]

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The comparisons of sizes that every call must satisfy."""
        return tuple(record for record in self.records if isinstance(record, Guard))

    def function(self, name: str) -> Function:
        """Return the function called `name`. Raises KeyError if there is none."""
        for candidate in self.functions:
            if candidate.name == name:
                return candidate
        raise KeyError(name)
