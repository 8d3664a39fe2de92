"""What a step of a redistribution takes, in the form that it has in common with many others.

Steps along one mesh axis that differ in how much lies behind the dims that they are about are the same ops, on tensors
with another last dim. They are written once, with a last dim of one element, and the simulator's planner says what each
takes with as many as there are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache

from distir_relax.analysis.device_classes import DeviceClasses
from distir_relax.analysis.op_timer import FEMTOSECONDS, Planner
from distir_relax.cost.profile import Level, Profile
from distir_relax.ir import DTensorType, Function, Input, Module, Op, PlacedType, TensorType, Value
from distir_relax.ir.device_equivalence import local_type
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.distributed_builder import PlacedEmitter
from distir_relax.lowering.redistribute import Move, lower_transition
from distir_relax.sharding import Transition
from distir_relax.sharding.factor_selection import Placed

_DTYPE = "float32"
"""Of the tensors that a step is written with."""


@dataclass(frozen=True, slots=True)
class Form:
    """A step of a redistribution of a tensor of so many dims, of these `sizes`, and one behind them that it is not
    about; `placements` is how the tensor lies before it."""

    sizes: tuple[int, ...]
    placements: Placed
    step: Transition


@dataclass(frozen=True, slots=True)
class _Machine:
    """A machine without what does not matter to a step: how much memory it has."""

    levels: tuple[Level, ...]
    profile: Profile = field(hash=False)


@dataclass(slots=True)
class Steps:
    """What redistributions and their steps take on a mesh of devices that are alike."""

    mesh: DeviceMesh
    profile: Profile
    moves: dict[tuple[TensorType, Placed], dict[Placed, float]] = field(default_factory=dict)
    """The seconds of each redistribution that was asked for, by its source and its target."""
    _known: dict[Form, _Timed] = field(default_factory=dict)

    @classmethod
    def on(cls, mesh: DeviceMesh, profile: Profile) -> Steps:
        """Those of a mesh of a machine: of the last few ones, all that was found before is known."""
        return _steps(mesh, _Machine(profile.levels, replace(profile, memory=0.0)))

    def seconds(self, form: Form, behind: int, dtype: str) -> float:
        """The time of a step of a tensor with so many elements behind the dims that it is about."""
        timed = self._known.get(form)
        if timed is None:
            module = _written(form, self.mesh)
            planner = Planner(self.profile, DeviceClasses(module, self.profile), {})
            timed = self._known[form] = _Timed(module.main.ops, planner)
        return timed.seconds(behind, dtype)


# A search of strategies asks for the same of many programs.
@lru_cache(maxsize=4)
def _steps(mesh: DeviceMesh, machine: _Machine) -> Steps:
    return Steps(mesh, machine.profile)


@dataclass(slots=True)
class _Timed:
    """The ops of a step, and who says what they take."""

    ops: tuple[Op, ...]
    planner: Planner
    _found: dict[tuple[int, str], float] = field(default_factory=dict)
    _types: list[dict[int, PlacedType]] = field(default_factory=list)
    """Kept, since the planner knows types by identity."""

    def seconds(self, behind: int, dtype: str) -> float:
        key = behind, dtype
        if key not in self._found:
            self._found[key] = self._seconds(behind, dtype)
        return self._found[key]

    def _seconds(self, behind: int, dtype: str) -> float:
        types: dict[int, PlacedType] = {}
        self._types.append(types)
        taken: dict[int, int] = defaultdict(int)
        for op in self.ops:
            ends = ([_like(value, behind, dtype, types) for value in values] for values in (op.operands, op.results))
            operands, results = map(tuple, ends)
            for step in self.planner.plan(Op(op.name, operands, results, op.attrs), None, {}).steps:
                for c in step.classes:
                    taken[c] += step.duration
        return max(taken.values(), default=0) / FEMTOSECONDS


def _like(value: Value, behind: int, dtype: str, known: dict[int, PlacedType]) -> Value:
    """A value of another dtype, and of as many elements in its last dim."""
    kind = value.placed
    if id(kind) not in known:
        shape = kind.shape if behind == 1 else (*kind.shape[:-1], behind)
        known[id(kind)] = PlacedType(shape, dtype, kind.devices)
    return Value(value.name, known[id(kind)])


def _written(form: Form, mesh: DeviceMesh) -> Module:
    """The program of a step."""
    kind = DTensorType((*form.sizes, 1), _DTYPE, form.placements)
    value = Value("x", local_type(kind, mesh))
    emitter = PlacedEmitter(mesh, {"x"})
    lower_transition(Move(emitter, kind.shape, list(kind.placements)), value, form.step)
    main = Function("main", (Input(value, "input"),), tuple(emitter.ops), ())
    return Module("distributed", (main,), (mesh,))
