"""Type and device propagation, and mixed interpretation: one domain, in which some values are known numbers.

With types alone this is type propagation (section 3 of the DistIR paper); where inputs are given as numbers, what
follows from them is known too, so that shapes computed by the program itself (figure 4) are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.analysis.interpreter import Domain, Interpreter
from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Function,
    Input,
    Module,
    Op,
    PlacedType,
    TensorType,
    Untyped,
    Value,
    fresh_name,
    on_devices,
    print_devices,
    verify_type,
)
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.dispatch import dispatch, type_of
from distir_relax.ops.table.spmd_inference import differs, infer_placed, result_devices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Number:
    """A tensor whose numbers are known, the same on each of `devices`."""

    value: torch.Tensor
    devices: tuple[int, ...]

    @property
    def type(self) -> PlacedType:
        """Its type."""
        kind = type_of(self.value)
        return PlacedType(kind.shape, kind.dtype, self.devices)


Known = PlacedType | Number
"""What is known of a value: its type on its devices, or its numbers too."""


def propagate_types(
    module: Module, inputs: Mapping[str, torch.Tensor | PlacedType] | None = None
) -> tuple[Module, dict[str, Known]]:
    """The program with the types that its text left out, and what is known of each value of the entry function.

    `inputs` gives numbers, or types, to inputs of the entry function by name. A function is written once for each way
    in which it is called. Raises `VerificationError`, naming the op and the devices, where operands do not fit an op,
    lie on different devices, or a type written in the program is not what follows.
    """
    if module.stage != "distributed":
        raise VerificationError(f"types are propagated in the distributed stage, found the {module.stage} stage")
    given = inputs or {}
    domain = _Types(module)
    elements = [_given(module, item, given.get(item.value.name)) for item in module.main.inputs]
    main = domain.function(module.main, elements, lambda: Interpreter(module, domain).run(elements))
    return replace(module, functions=(main, *domain.written.values())), domain.known


def infer_types(module: Module) -> Module:
    """The program with the types that its text left out; itself where it left out none. See `propagate_types`."""
    if not any(isinstance(kind, Untyped) for kind in _all_types(module)):
        return module
    return propagate_types(module)[0]


def _all_types(module: Module) -> Iterator[object]:
    for function in module.functions:
        yield from (item.value.type for item in function.inputs)
        yield from (value.type for op in function.ops for value in op.results)


def _given(module: Module, item: Input, given: torch.Tensor | PlacedType | None) -> Known:
    value = item.value
    kind = given if isinstance(given, PlacedType) else value.type
    if isinstance(kind, Untyped) and isinstance(given, (PlacedType, type(None))):
        raise VerificationError(f"the input {value} has no type", item.location, f"write it: {value}: f32[4,8] @ {{0}}")
    if given is not None and not isinstance(given, PlacedType):
        assert isinstance(kind, (PlacedType, Untyped))
        return Number(given, kind.devices or (0,))
    if isinstance(kind, PlacedType):
        verify_type(module, Value(value.name, kind), item.location)
        return kind
    return value.placed


@dataclass
class _Frame:
    """A function being written: its ops, and the value that stands for each of the old program's."""

    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


@dataclass
class _Types(Domain[Known]):
    module: Module
    frames: list[_Frame] = field(default_factory=list)
    written: dict[object, Function] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def function(self, function: Function, inputs: Sequence[Known], run: Callable[[], object]) -> Function:
        """The function as it is with these inputs; `run` interprets it."""
        frame = _Frame()
        self.frames.append(frame)
        items = []
        for item, element in zip(function.inputs, inputs, strict=True):
            frame.values[item.value.name] = _checked(item.value, _type(element), item.location)
            items.append(replace(item, value=frame.values[item.value.name]))
            self._note(item.value, element)
        run()
        self.frames.pop()
        name = fresh_name(function.name, self.names)
        outputs = tuple(replace(o, value=frame.values[o.value.name]) for o in function.outputs)
        return Function(name, tuple(items), tuple(frame.ops), outputs)

    def apply(self, op: Op, operands: Sequence[Known]) -> Sequence[Known]:
        results = self._results(op, operands)
        if len(results) != len(op.results):
            raise VerificationError(f"{op.name} gives {len(results)} values, found {len(op.results)}", op.location)
        self._write(op, results)
        return results

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[Known],
        last: Sequence[bool],
        run: Callable[[Sequence[Known]], list[Known]],
    ) -> list[Known]:
        devices = op.devices
        if devices is None:
            raise VerificationError(f"a call of @{callee.name} must say its devices", op.location)
        if len(operands) != len(callee.inputs) or len(op.results) != len(callee.outputs):
            raise VerificationError(
                f"@{callee.name} takes {len(callee.inputs)} values and gives {len(callee.outputs)}, "
                f"found {len(operands)} and {len(op.results)}",
                op.location,
            )
        inside = [_renumbered(x, devices, op) for x in operands]
        # What a function does with numbers is its own affair; the types decide whether two calls are alike.
        key = (callee.name, tuple(map(_type, inside)))
        if any(isinstance(x, Number) for x in inside):
            key = (*key, object())  # type: ignore[assignment]
        found: list[Known] = []
        if key not in self.written:
            self.written[key] = self.function(callee, inside, lambda: found.extend(run(inside)))
        function = self.written[key]
        if not found:
            found = [o.value.placed for o in function.outputs]
        results = [_moved(x, devices) for x in found]
        self._write(replace(op, attrs={**op.attrs, "callee": function.name}), results)
        return results

    def _results(self, op: Op, operands: Sequence[Known]) -> tuple[Known, ...]:
        kinds = [_type(x) for x in operands]
        written = op.results[0].type
        devices = written.devices if isinstance(written, (PlacedType, Untyped)) else ()
        entry = lookup(op.name, op.location)
        if not devices:
            devices = result_devices(op.name, kinds, op.location)
        elif Trait.TRANSFER not in entry.traits:
            _check_together(op, kinds, devices)
        # Where devices differ in sizes or attributes, nothing is one number on all of them.
        alone = Trait.ON_COMMUNICATOR in entry.traits and Trait.TRANSFER not in entry.traits
        if (
            not alone
            and not differs(kinds, op.attrs)
            and (not operands or entry.semantics.mixed or _any_number(operands))
        ):
            known = [x.value if isinstance(x, Number) else x.local(0) for x in operands]
            if Trait.TRANSFER in entry.traits:
                return tuple(_placed(x, devices) for x in known)
            return tuple(_placed(x, devices) for x in dispatch(op, known))
        return infer_placed(op.name, kinds, op.attrs, devices, op.location)

    def _write(self, op: Op, results: Sequence[Known]) -> None:
        frame = self.frames[-1]
        values = []
        for value, element in zip(op.results, results, strict=True):
            frame.values[value.name] = _checked(value, _type(element), op.location or op.name)
            values.append(frame.values[value.name])
            self._note(value, element)
        operands = tuple(frame.values[v.name] for v in op.operands)
        frame.ops.append(replace(op, operands=operands, results=tuple(values)))

    def _note(self, value: Value, element: Known) -> None:
        if len(self.frames) == 1:
            self.known[value.name] = element


def _any_number(operands: Sequence[Known]) -> bool:
    return any(isinstance(x, Number) for x in operands)


def _check_together(op: Op, kinds: Sequence[PlacedType], devices: tuple[int, ...]) -> None:
    """A local op finds its operands on each of its devices."""
    for value, kind in zip(op.operands, kinds, strict=True):
        if kind.devices is not devices and not set(devices) & set(kind.devices):
            raise VerificationError(
                f"{op.name} on {print_devices(devices)} takes {value}, which lies on {print_devices(kind.devices)}",
                op.location,
                "send it there first",
            )


def _checked(value: Value, kind: PlacedType, where: str) -> Value:
    """`value` with the type that follows. Raises `VerificationError` when it was written with another one."""
    if not isinstance(value.type, Untyped) and value.type != kind:
        raise VerificationError(f"{value} is {kind}, the program says {value.type}", where)
    return Value(value.name, kind)


def _type(element: Known) -> PlacedType:
    return element.type if isinstance(element, Number) else element


def _placed(known: TensorType | torch.Tensor, devices: tuple[int, ...]) -> Known:
    if isinstance(known, TensorType):
        return PlacedType(known.shape, known.dtype, devices)
    return Number(known, devices)


def _renumbered(element: Known, devices: tuple[int, ...], op: Op) -> Known:
    """What is known of an operand, in the numbering of the function that is called on `devices`."""
    outside = _type(element).devices
    if outside == devices:
        inside = tuple(range(len(devices)))
    else:
        place = {device: i for i, device in enumerate(devices)}
        if any(device not in place for device in outside):
            raise VerificationError(
                f"@{op.callee} is called on {print_devices(devices)} with an operand on {print_devices(outside)}",
                op.location,
            )
        inside = tuple(place[device] for device in outside)
    return Number(element.value, inside) if isinstance(element, Number) else replace(element, devices=inside)


def _moved(element: Known, devices: tuple[int, ...]) -> Known:
    if isinstance(element, Number):
        return Number(element.value, tuple(devices[i] for i in element.devices))
    return on_devices(element, devices)
