"""Programs: ``Module > Function > Op > Value``, straight-line and in static single assignment form.

Everything is a frozen dataclass; a pass builds a new program. A module is at exactly one stage:

===========  ==============  ============================================  =====================
stage        types           what is new                                   made by
===========  ==============  ============================================  =====================
global       `TensorType`    the user's model                              frontends
sharded      `DTensorType`   every value laid out, `redistribute` ops      `sharding.propagate`
distributed  `PlacedType`    device sets, explicit communication           `lowering.to_distir`
ranked       `TensorType`    one function per distinct rank                `lowering.project`
===========  ==============  ============================================  =====================

In the distributed stage program order is the schedule: a device runs its ops one at a time, in this order. An op
`CALL` runs another function of the module, whose devices are numbered from 0 and stand for the call's own, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.ir.placement import DeviceMesh
from distir_relax.ir.types import DTensorType, PerRank, Type

STAGES = ("global", "sharded", "distributed", "ranked")
ROLES = ("input", "parameter", "constant", "state")

CALL = "call"
"""The op that runs a function; its attributes are `callee` and `devices`, which stand for the callee's 0, 1, 2, …"""

WAIT = "wait"
"""The op that joins the stream on which its operand is made; an op names its stream with the attribute `stream`."""

Attribute = int | float | bool | str | None | PerRank | tuple["Attribute", ...]


def fresh_name(name: str, taken: set[str]) -> str:
    """`name`, or ``name_1``, ``name_2``, … when it is taken; the name returned is then in `taken`."""
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor, defined once: by a function's input or by an op."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `name` is its entry in the op table; `location` is the place in the user's model."""

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    location: str = ""

    @property
    def callee(self) -> str:
        """The function that a call runs; nothing for another op."""
        return str(self.attrs["callee"]) if self.name == CALL else ""


@dataclass(frozen=True, slots=True)
class Input:
    """A function's input. `role`: input, parameter, constant, or state (updated by the program).

    `location` is where the user declared it. `layout` is the global tensor that the devices hold pieces of, where a
    program of the distributed stage says so."""

    value: Value
    role: str = "input"
    location: str = ""
    layout: DTensorType | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A function's output and the name under which the user gets it; `layout` as for an `Input`."""

    name: str
    value: Value
    layout: DTensorType | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """Inputs, ops in program order, outputs."""

    name: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """Functions at one stage. `ranks` (ranked stage) names the function that each rank runs."""

    stage: str
    functions: tuple[Function, ...]
    meshes: tuple[DeviceMesh, ...] = ()
    ranks: tuple[str, ...] = ()

    @property
    def main(self) -> Function:
        """The entry function."""
        return self.functions[0]

    def function(self, name: str) -> Function:
        """The function called `name`; raises KeyError when there is none."""
        for candidate in self.functions:
            if candidate.name == name:
                return candidate
        raise KeyError(name)
