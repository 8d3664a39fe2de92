"""Type and device propagation, and mixed interpretation: a domain in which some values are known tensors.

Without known tensors this is type propagation (section 3 of the DistIR paper). Given known inputs, results that depend
only on them are known too, so shapes that the program itself computes (figure 4) are determined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.errors import VerificationError
from distir_relax.interpret.interpreter import Domain, Interpreter
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
    print_devices,
    remap_devices,
    verify_type,
)
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.dispatch import dispatch, type_of
from distir_relax.ops.table.spmd_inference import differs, infer_placed, result_devices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Number:
    """A known tensor, the same on each of `devices`."""

    value: torch.Tensor
    devices: tuple[int, ...]

    @property
    def type(self) -> PlacedType:
        """The type of the tensor."""
        kind = type_of(self.value)
        return PlacedType(kind.shape, kind.dtype, self.devices)


AbstractValue = PlacedType | Number
"""The abstract value: a type on devices, or a known tensor."""


def propagate_types(
    module: Module, inputs: Mapping[str, torch.Tensor | PlacedType] | None = None
) -> tuple[Module, dict[str, AbstractValue]]:
    """Infer the types that a program's text omits; return it with the abstract values of the entry function.

    `inputs` has tensors or types of inputs of the entry function by name. A function is specialized for each
    combination of operand types. Raises `VerificationError`, naming the op and devices, if operands do not fit an op or
    are on different devices, or a type in the program differs from the inferred one.
    """
    if module.stage != "distributed":
        raise VerificationError(f"types are propagated in the distributed stage, found the {module.stage} stage")
    given_inputs = inputs or {}
    domain = _TypeDomain(module)
    elements = [_input_value(module, item, given_inputs.get(item.value.name)) for item in module.main.inputs]
    main = domain.function(module.main, elements, lambda: Interpreter(module, domain).run(elements))
    return replace(module, functions=(main, *domain.specialized.values())), domain.abstract_values


def infer_types(module: Module) -> Module:
    """Infer the types that a program's text omits; return it unchanged if there are none. See `propagate_types`."""
    if not any(isinstance(kind, Untyped) for kind in _all_types(module)):
        return module
    return propagate_types(module)[0]


def _all_types(module: Module) -> Iterator[object]:
    for function in module.functions:
        yield from (item.value.type for item in function.inputs)
        yield from (value.type for op in function.ops for value in op.results)


def _input_value(module: Module, item: Input, given_value: torch.Tensor | PlacedType | None) -> AbstractValue:
    value = item.value
    type_ = given_value if isinstance(given_value, PlacedType) else value.type
    if isinstance(type_, Untyped) and isinstance(given_value, (PlacedType, type(None))):
        raise VerificationError(f"the input {value} has no type", item.location, f"write it: {value}: f32[4,8] @ {{0}}")
    if given_value is not None and not isinstance(given_value, PlacedType):
        assert isinstance(type_, (PlacedType, Untyped))
        return Number(given_value, type_.devices or (0,))
    if isinstance(type_, PlacedType):
        verify_type(module, Value(value.name, type_), item.location)
        return type_
    return value.placed


@dataclass
class _Frame:
    """A function under construction: its ops, and the new value of each old one."""

    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


@dataclass
class _TypeDomain(Domain[AbstractValue]):
    module: Module
    frames: list[_Frame] = field(default_factory=list)
    specialized: dict[object, Function] = field(default_factory=dict)
    abstract_values: dict[str, AbstractValue] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def function(self, function: Function, inputs: Sequence[AbstractValue], run: Callable[[], object]) -> Function:
        """Build the function for these inputs; `run` interprets it."""
        frame = _Frame()
        self.frames.append(frame)
        items = []
        for item, element in zip(function.inputs, inputs, strict=True):
            frame.values[item.value.name] = _with_type(item.value, _type(element), item.location)
            items.append(replace(item, value=frame.values[item.value.name]))
            self._record(item.value, element)
        run()
        self.frames.pop()
        name = fresh_name(function.name, self.names)
        outputs = tuple(replace(o, value=frame.values[o.value.name]) for o in function.outputs)
        return Function(name, tuple(items), tuple(frame.ops), outputs)

    def apply(self, op: Op, operands: Sequence[AbstractValue]) -> Sequence[AbstractValue]:
        results = self._results(op, operands)
        if len(results) != len(op.results):
            raise VerificationError(f"{op.name} gives {len(results)} values, found {len(op.results)}", op.location)
        self._emit(op, results)
        return results

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[AbstractValue],
        last: Sequence[bool],
        run: Callable[[Sequence[AbstractValue]], list[AbstractValue]],
    ) -> list[AbstractValue]:
        devices = op.devices
        if devices is None:
            raise VerificationError(f"a call of @{callee.name} must say its devices", op.location)
        if len(operands) != len(callee.inputs) or len(op.results) != len(callee.outputs):
            raise VerificationError(
                f"@{callee.name} takes {len(callee.inputs)} values and gives {len(callee.outputs)}, "
                f"found {len(operands)} and {len(op.results)}",
                op.location,
            )
        callee_operands = [_to_inner(x, devices, op) for x in operands]
        # Types decide whether two calls are equal; calls with known tensors are never shared.
        key = (callee.name, tuple(map(_type, callee_operands)))
        if any(isinstance(x, Number) for x in callee_operands):
            key = (*key, object())  # type: ignore[assignment]
        results: list[AbstractValue] = []
        if key not in self.specialized:
            self.specialized[key] = self.function(callee, callee_operands, lambda: results.extend(run(callee_operands)))
        function = self.specialized[key]
        if not results:
            results = [o.value.placed for o in function.outputs]
        call_results = [_to_caller_devices(x, devices) for x in results]
        self._emit(replace(op, attrs={**op.attrs, "callee": function.name}), call_results)
        return call_results

    def _results(self, op: Op, operands: Sequence[AbstractValue]) -> tuple[AbstractValue, ...]:
        types = [_type(x) for x in operands]
        result_type = op.results[0].type
        devices = result_type.devices if isinstance(result_type, (PlacedType, Untyped)) else ()
        entry = lookup(op.name, op.location)
        if not devices:
            devices = result_devices(op.name, types, op.location)
        elif Trait.TRANSFER not in entry.traits:
            _check_operand_devices(op, types, devices)
        # If sizes or attributes differ between devices, no result is the same tensor on all of them.
        is_collective = Trait.ON_COMMUNICATOR in entry.traits and Trait.TRANSFER not in entry.traits
        if (
            not is_collective
            and not differs(types, op.attrs)
            and (not operands or entry.semantics.partial_eval or _has_number(operands))
        ):
            local_values = [x.value if isinstance(x, Number) else x.local(0) for x in operands]
            if Trait.TRANSFER in entry.traits:
                return tuple(_placed(x, devices) for x in local_values)
            return tuple(_placed(x, devices) for x in dispatch(op, local_values))
        return infer_placed(op.name, types, op.attrs, devices, op.location)

    def _emit(self, op: Op, results: Sequence[AbstractValue]) -> None:
        frame = self.frames[-1]
        values = []
        for value, element in zip(op.results, results, strict=True):
            frame.values[value.name] = _with_type(value, _type(element), op.location or op.name)
            values.append(frame.values[value.name])
            self._record(value, element)
        operands = tuple(frame.values[v.name] for v in op.operands)
        frame.ops.append(replace(op, operands=operands, results=tuple(values)))

    def _record(self, value: Value, element: AbstractValue) -> None:
        if len(self.frames) == 1:
            self.abstract_values[value.name] = element


def _has_number(operands: Sequence[AbstractValue]) -> bool:
    return any(isinstance(x, Number) for x in operands)


def _check_operand_devices(op: Op, types: Sequence[PlacedType], devices: tuple[int, ...]) -> None:
    """Check that a local op has its operands on each of its devices."""
    for value, type_ in zip(op.operands, types, strict=True):
        if type_.devices is not devices and not set(devices) & set(type_.devices):
            raise VerificationError(
                f"{op.name} on {print_devices(devices)} takes {value}, which is on {print_devices(type_.devices)}",
                op.location,
                "send it there first",
            )


def _with_type(value: Value, type_: PlacedType, where: str) -> Value:
    """Return `value` with the inferred type. Raises `VerificationError` if the program declares another one."""
    if not isinstance(value.type, Untyped) and value.type != type_:
        raise VerificationError(f"{value} is {type_}, the program declares {value.type}", where)
    return Value(value.name, type_)


def _type(element: AbstractValue) -> PlacedType:
    return element.type if isinstance(element, Number) else element


def _placed(value: TensorType | torch.Tensor, devices: tuple[int, ...]) -> AbstractValue:
    if isinstance(value, TensorType):
        return PlacedType(value.shape, value.dtype, devices)
    return Number(value, devices)


def _to_inner(element: AbstractValue, devices: tuple[int, ...], op: Op) -> AbstractValue:
    """Return an operand with its devices renumbered as in the function that is called on `devices`."""
    outer = _type(element).devices
    if outer == devices:
        inner = tuple(range(len(devices)))
    else:
        position = {device: i for i, device in enumerate(devices)}
        if any(device not in position for device in outer):
            raise VerificationError(
                f"@{op.callee} is called on {print_devices(devices)} with an operand on {print_devices(outer)}",
                op.location,
            )
        inner = tuple(position[device] for device in outer)
    return Number(element.value, inner) if isinstance(element, Number) else replace(element, devices=inner)


def _to_caller_devices(element: AbstractValue, devices: tuple[int, ...]) -> AbstractValue:
    if isinstance(element, Number):
        return Number(element.value, tuple(devices[i] for i in element.devices))
    return remap_devices(element, devices)
