"""Verifier: the invariants of a program at each stage; tests run it before and after each pass."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from distir_relax.errors import VerificationError
from distir_relax.ir.inline import remap_devices, verify_no_recursion
from distir_relax.ir.program import KINDS, STAGES, WAIT, Function, Module, Op, Value
from distir_relax.ir.types import (
    EACH,
    DTensorType,
    PerRank,
    PlacedType,
    TensorType,
    Type,
    Untyped,
    print_devices,
)
from distir_relax.layout import DTYPES, DeviceMesh, Shard, assuming, is_always, is_symbolic, typical_value
from distir_relax.layout.validate import find_problem

MAX_BYTES = 2**63 - 1
"""Maximum size of a tensor: sizes and offsets are int64."""


class OpCheck(Protocol):
    """Interface of the op table (`distir_relax.ops.check`), which knows ops by name."""

    def op(self, op: Op, stage: str) -> None:
        """Raise `VerificationError` unless the op's results are consistent with its operands."""

    def ranks(self, module: Module) -> None:
        """Raise `VerificationError` unless the programs of a ranked module's ranks are consistent."""


_TYPES_OF_STAGE = {
    "global": (TensorType,), "sharded": (DTensorType,), "distributed": (PlacedType,), "ranked": (TensorType,),
    "executable": (TensorType, PlacedType),
}  # fmt: skip
_OF_RANKS = ("ranked", "executable")
"""Stages whose functions are programs of ranks."""


def verify(module: Module, check: OpCheck | None = None, known: Known | None = None) -> None:
    """Raise `VerificationError` unless `module` is valid at its stage.

    - every value is defined once, before its uses, and used with the type of its definition;
    - every type is one of the stage; placements fit their mesh and shape, cuts add up to their dim;
    - an axis named by an op is an axis of a mesh; its step is a number;
    - a call names a function of the module that is not recursive, and matches its inputs and outputs; in the
      distributed stage it has devices;
    - in the distributed stage, sizes by device list one size per device; values computed on a stream are used elsewhere
      only after a wait;
    - in the ranked stage, every rank names a function; the ranks' communications match;
    - in the executable stage alone, weights are packed, and attributes say what happens to memory.

    `check` is the op table's checker (`ops.check`); without it, result types and communications are not checked. What
    is `known` of an earlier version of the program is not checked again.
    """
    if module.stage not in STAGES:
        raise VerificationError(f"a module is at one of the stages {', '.join(STAGES)}, found {module.stage!r}")
    if not module.functions:
        raise VerificationError("a module has at least one function, found none")
    names = {f.name for f in module.functions}
    if len(names) != len(module.functions):
        raise VerificationError("functions have distinct names, found one twice")
    verify_no_recursion(module)
    functions = {f.name: f for f in module.functions}
    known = Known() if known is None else known
    known.begin(module)
    with assuming(module.guards):
        for function in module.functions:
            _verify_function(module, function, functions, check, known)
    if module.stage != "executable" and (missing := set(module.ranks) - names):
        raise VerificationError(f"every rank runs a function of the module, found no {sorted(missing)}")
    if module.stage == "ranked" and module.meshes and len(module.ranks) != module.meshes[0].size:
        raise VerificationError(
            f"a ranked module names the function of each of its {module.meshes[0].size} ranks, "
            f"found {len(module.ranks)}"
        )
    if module.stage == "ranked" and check:
        check.ranks(module)


def verifies_by_default() -> bool:
    """Return whether programs are verified by default: if the variable DISTIR_VERIFY is 1."""
    return os.environ.get("DISTIR_VERIFY", "0") == "1"


class Known:
    """Ops and types of a program that are valid at its stage: passes keep most of them."""

    def __init__(self) -> None:
        self._context: object = None
        self._before: dict[int, object] = {}
        self._now: dict[int, object] = {}

    def begin(self, module: Module) -> None:
        """Begin with a version of the program; nothing is known of one at another stage, or with other meshes."""
        context = module.stage, module.meshes, module.guards
        self._before = self._now if context == self._context else {}
        self._context, self._now = context, {}

    def is_new(self, thing: object) -> bool:
        """Return whether an op or a type is not known yet: neither of this version nor of the one before."""
        if id(thing) in self._now:
            return False
        if id(thing) not in self._before:
            return True
        self.add(thing)
        return False

    def add(self, thing: object) -> None:
        """Take note of an op or a type that is valid. It is kept, so that no other object has the same number."""
        self._now[id(thing)] = thing


def _verify_function(
    module: Module, function: Function, functions: Mapping[str, Function], check: OpCheck | None, known: Known
) -> None:
    defined: dict[str, Value] = {}

    def define(value: Value, where: str) -> None:
        if value.name in defined:
            raise VerificationError(f"{value} is defined twice in @{function.name}", where)
        if known.is_new(value.type):
            verify_type(module, value, where)
            known.add(value.type)
        defined[value.name] = value

    def use(value: Value, where: str) -> None:
        definition = defined.get(value.name)
        if definition is None:
            raise VerificationError(f"{value} is used before it is defined in @{function.name}", where)
        if definition is not value and definition != value:
            raise VerificationError(
                f"{value} is used as {value.type} but was defined as {definition.type} in @{function.name}",
                where,
            )

    for item in function.inputs:
        define(item.value, item.location)
    for op in function.ops:
        where = op.location or f"@{function.name}, {op.name}"
        for operand in op.operands:
            use(operand, where)
        axis = op.attrs.get("axis")
        # For ranked programs `check` reports it, with the rank.
        if (
            isinstance(axis, str)
            and module.stage == "distributed"
            and all(axis not in mesh.axes for mesh in module.meshes)
        ):
            axes = ", ".join(name for mesh in module.meshes for name in mesh.axes) or "none"
            raise VerificationError(f"no mesh of the program has an axis {axis!r}, found {axes}", where)
        for result in op.results:
            define(result, where)
        _verify_schedule(op, module.stage, where)
        if op.callee:
            _verify_call(module, functions, op, where)
        elif check and known.is_new(op):
            check.op(op, module.stage)
            known.add(op)
    for output in function.outputs:
        use(output.value, f"output {output.name!r}")
    _verify_streams(function)


def _verify_schedule(op: Op, stage: str, where: str) -> None:
    """Raise `VerificationError` unless the step of an op is a number, and attributes of a rank's op are its own."""
    is_of_rank = stage in _OF_RANKS and not any(isinstance(v.type, PlacedType) for v in op.results)
    if is_of_rank and any(_differs_by_rank(value) for value in op.attrs.values()):
        raise VerificationError("attributes of a rank's op are values, found some by device", where)
    if stage != "executable" and (execution := op.execution):
        raise VerificationError(f"{', '.join(execution)} of an op belongs to the executable stage", where)
    step = op.attrs.get("step", 0)
    if type(step) is not int or step < 0:
        raise VerificationError(f"the step of an op is a number, found {step!r}", where)


def _differs_by_rank(value: object) -> bool:
    return any(map(_differs_by_rank, value)) if isinstance(value, tuple) else isinstance(value, PerRank)


def _verify_call(module: Module, functions: Mapping[str, Function], op: Op, where: str) -> None:
    name, devices = op.callee, op.devices
    values = *op.operands, *op.results
    is_placed = module.stage == "distributed" or any(isinstance(v.type, PlacedType) for v in values)
    if (devices is not None) != is_placed:
        raise VerificationError(
            f"calls of programs of all devices name theirs, others do not, found @{name} "
            f"{'on some' if devices is not None else 'on none'} in the {module.stage} stage",
            where,
        )
    for key, value in op.task.items():
        if not (value in KINDS if key == "kind" else type(value) is int and value >= 0):
            raise VerificationError(f"the {key} of a call is {_EXPECTED[key]}, found {value!r}", where)
    callee = functions[name]
    inputs = [i.value for i in callee.inputs]
    if len(op.operands) != len(inputs) or len(op.results) != len(callee.outputs):
        raise VerificationError(
            f"@{name} takes {len(inputs)} values and gives {len(callee.outputs)}, "
            f"found {len(op.operands)} and {len(op.results)}",
            where,
        )
    if devices is not None:
        _verify_devices(module, devices, "a call", where)
    pairs = [*zip(op.operands, inputs, strict=True), *zip(op.results, (o.value for o in callee.outputs), strict=True)]
    for outer, inner in pairs:
        kind = inner.type
        if devices is not None:
            if not isinstance(kind, PlacedType) or max(kind.devices) >= len(devices):
                raise VerificationError(f"{inner} of @{name} is not on the devices {print_devices(devices)}", where)
            kind = remap_devices(kind, devices)
        # A function that is called for each request takes and gives one of each.
        if kind != outer.type and kind != _one(outer.type):
            raise VerificationError(
                f"{inner} of @{name} is {kind} in this call, found {outer}: {outer.type}",
                where,
            )


_EXPECTED = {"stage": "a number", "kind": f"one of {', '.join(KINDS)}", "microbatch": "a number"}


def _verify_streams(function: Function) -> None:
    stream_of: dict[str, object] = {}
    for op in function.ops:
        stream = op.attrs.get("stream")
        for value in op.operands:
            if stream_of.get(value.name) not in (None, stream) and op.name != WAIT:
                raise VerificationError(
                    f"{value} is computed on stream {stream_of[value.name]!r} of @{function.name}",
                    op.location,
                    f"wait for it first: %ready = {WAIT}({value})",
                )
        stream_of.update((v.name, stream) for v in op.results)
    for output in function.outputs:
        if stream_of.get(output.value.name):
            raise VerificationError(f"output {output.name!r} is still on a stream, expected a {WAIT} before it")


def verify_type(module: Module, value: Value, where: str) -> None:
    """Raise `VerificationError` unless a value's type is valid in itself and at the module's stage."""
    kind = value.type
    expected = _TYPES_OF_STAGE[module.stage]
    if not isinstance(kind, expected):
        names = " or ".join(t.__name__ for t in expected)
        raise VerificationError(f"the {module.stage} stage has {names} values, found {value}: {kind}", where)
    assert not isinstance(kind, Untyped)
    if not isinstance(kind, DTensorType) and kind.form and module.stage != "executable":
        raise VerificationError(
            f"values are packed, or one each, in the executable stage, found {value}: {kind}", where
        )
    _verify_sizes(kind, value, where)
    if isinstance(kind, DTensorType):
        if kind.mesh >= len(module.meshes):
            raise VerificationError(f"{value} is on mesh[{kind.mesh}], found {len(module.meshes)} meshes", where)
        verify_placements(kind, module.meshes[kind.mesh], f"{where} {value}".strip())
    if isinstance(kind, PlacedType):
        _verify_devices(module, kind.devices, str(value), where)
        for size in kind.shape:
            if isinstance(size, PerRank) and len(size.values) != len(kind.devices):
                raise VerificationError(
                    f"{value} lists {len(size.values)} sizes for {len(kind.devices)} devices", where
                )


def _one(kind: Type) -> Type:
    """Return the type of a request's tensor, of one for each request."""
    return kind.plain if isinstance(kind, (TensorType, PlacedType)) and kind.form == EACH else kind


def _verify_devices(module: Module, devices: tuple[int, ...], what: str, where: str) -> None:
    # One comparison per value: sets may have thousands of devices.
    if not devices or any(a >= b for a, b in pairwise(devices)):
        raise VerificationError(
            f"{what} is on a set of devices in ascending order, found {print_devices(devices)}", where
        )
    count = max((mesh.size for mesh in module.meshes), default=devices[-1] + 1)
    if devices[0] < 0 or devices[-1] >= count:
        raise VerificationError(f"{what} is on devices {print_devices(devices)}, the mesh has {count}", where)


def _verify_sizes(kind: TensorType | DTensorType | PlacedType, value: Value, where: str) -> None:
    largest: Sequence[Any] = kind.shape
    smallest: Sequence[Any] = kind.shape
    if not all(type(n) is int for n in kind.shape):
        sizes = [n.values if isinstance(n, PerRank) else (n,) for n in kind.shape]
        symbolic = [n for n in set().union(*sizes) if is_symbolic(n)]
        if symbolic:
            if any(is_always(0, "<=", n) is False for n in symbolic):
                raise VerificationError(f"{value} has a negative size: {kind}", where)
            sizes = [tuple(map(typical_value, values)) for values in sizes]
        largest = [max(values, default=0) for values in sizes]
        smallest = [min(values, default=0) for values in sizes]
    if kind.dtype not in DTYPES or min(smallest, default=0) < 0:
        raise VerificationError(f"{value} has an invalid shape or dtype: {kind.dtype} {kind.shape}", where)
    if math.prod(largest) * DTYPES[kind.dtype][1] > MAX_BYTES:
        raise VerificationError(f"{value} is too large for any machine: {kind}", where)


def verify_placements(kind: DTensorType, mesh: DeviceMesh, where: str) -> None:
    """Raise `VerificationError` unless the placements fit the mesh and cut each dim exactly."""
    if problem := find_problem(kind.placements, mesh, kind.shape):
        raise VerificationError(problem[0], where, problem[1])
    for placement in kind.placements:
        if isinstance(placement, Shard) and placement.dim < 0:
            raise VerificationError(f"{placement} counts its dim from the end", where)
        if isinstance(placement, Shard) and placement.cut is None:
            raise VerificationError(f"{placement} does not say how dim {placement.dim} is cut", where)
