"""Cost of single redistribution steps, shared by all steps that differ only in the size of their inner dims.

Such steps are lowered once, with an inner dim of one element; the simulator's op timer then takes the actual size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache

from distir_relax.cost.profile import Level, Profile
from distir_relax.ir import DTensorType, Function, Input, Module, Op, PlacedType, TensorType, Value
from distir_relax.ir.device_equivalence import local_type
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.distributed_builder import SpmdBuilder
from distir_relax.lowering.redistribute import ReshardState, lower_transition
from distir_relax.sharding import Transition
from distir_relax.sharding.factor_selection import Placed
from distir_relax.simulation.device_classes import DeviceClasses
from distir_relax.simulation.op_timer import FEMTOSECONDS, OpTimer

_DTYPE = "float32"
"""The dtype of the tensors of a lowered step."""


@dataclass(frozen=True, slots=True)
class StepForm:
    """A canonical redistribution step: the `sizes` of the dims that it changes, with one inner dim after them.

    `placements` is the layout of the tensor before it.
    """

    sizes: tuple[int, ...]
    placements: Placed
    step: Transition


@dataclass(frozen=True, slots=True)
class _MachineKey:
    """A machine as a cache key, without its memory, which does not affect a step."""

    levels: tuple[Level, ...]
    profile: Profile = field(hash=False)


@dataclass(slots=True)
class ReshardCosts:
    """Costs of redistributions and their steps on a mesh of equal devices."""

    mesh: DeviceMesh
    profile: Profile
    reshards: dict[tuple[TensorType, Placed], dict[Placed, float]] = field(default_factory=dict)
    """The seconds of each redistribution that was requested, by its source and its target."""
    _timed_steps: dict[StepForm, _TimedStep] = field(default_factory=dict)

    @classmethod
    def on(cls, mesh: DeviceMesh, profile: Profile) -> ReshardCosts:
        """Return the costs of a mesh of a machine; those of the most recent ones are cached."""
        return _cached_costs(mesh, _MachineKey(profile.levels, replace(profile, memory=0.0)))

    def seconds(self, form: StepForm, inner: int, dtype: str) -> float:
        """Return the seconds of a step of a tensor with `inner` elements in the dims that it does not change."""
        step = self._timed_steps.get(form)
        if step is None:
            module = _lower(form, self.mesh)
            timer = OpTimer(self.profile, DeviceClasses(module, self.profile), {})
            step = self._timed_steps[form] = _TimedStep(module.main.ops, timer)
        return step.seconds(inner, dtype)


# A strategy search requests the same costs for many programs.
@lru_cache(maxsize=4)
def _cached_costs(mesh: DeviceMesh, machine: _MachineKey) -> ReshardCosts:
    return ReshardCosts(mesh, machine.profile)


@dataclass(slots=True)
class _TimedStep:
    """The ops of a step with their timer."""

    ops: tuple[Op, ...]
    timer: OpTimer
    _cache: dict[tuple[int, str], float] = field(default_factory=dict)
    _types: list[dict[int, PlacedType]] = field(default_factory=list)
    """Kept alive, since the timer identifies types by `id`."""

    def seconds(self, inner: int, dtype: str) -> float:
        key = inner, dtype
        if key not in self._cache:
            self._cache[key] = self._seconds(inner, dtype)
        return self._cache[key]

    def _seconds(self, inner: int, dtype: str) -> float:
        types: dict[int, PlacedType] = {}
        self._types.append(types)
        durations: dict[int, int] = defaultdict(int)
        for op in self.ops:
            sides = ([_resize(value, inner, dtype, types) for value in values] for values in (op.operands, op.results))
            operands, results = map(tuple, sides)
            for step in self.timer.effect(Op(op.name, operands, results, op.attrs), None, {}).steps:
                for device_class in step.classes:
                    durations[device_class] += step.duration
        return max(durations.values(), default=0) / FEMTOSECONDS


def _resize(value: Value, inner: int, dtype: str, types: dict[int, PlacedType]) -> Value:
    """Return a value of another dtype, with `inner` elements in its last dim."""
    type_ = value.placed
    if id(type_) not in types:
        shape = type_.shape if inner == 1 else (*type_.shape[:-1], inner)
        types[id(type_)] = PlacedType(shape, dtype, type_.devices)
    return Value(value.name, types[id(type_)])


def _lower(step: StepForm, mesh: DeviceMesh) -> Module:
    """Return the program of a step."""
    tensor = DTensorType((*step.sizes, 1), _DTYPE, step.placements)
    value = Value("x", local_type(tensor, mesh))
    emitter = SpmdBuilder(mesh, {"x"})
    lower_transition(ReshardState(emitter, tensor.shape, list(tensor.placements)), value, step.step)
    main = Function("main", (Input(value, "input"),), tuple(emitter.ops), ())
    return Module("distributed", (main,), (mesh,))
