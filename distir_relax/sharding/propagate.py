"""From annotations to a layout of every value: the global stage in, the sharded stage out.

Two steps. `spread` carries the annotations over the factors of ops, forwards and backwards, through the program with
calls written out. Then, op by op in program order, each op is split along the factor that moves the fewest bytes
(`choice`). Where an operand lies otherwise a `redistribute` is put before the op; a pending reduction is made
explicit as an ``I`` value with its `redistribute` behind (the RFC's legalisation).

A function is laid out once for each way in which its operands lie and in which annotations reach into it. Operands are
brought by its caller into the layouts that it needs, so that what several calls need is brought there once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import AnnotationError
from distir_relax.ir import (
    CALL,
    DTensorType,
    Function,
    Gather,
    Input,
    Instance,
    Module,
    Op,
    Output,
    Reason,
    Value,
    fresh_name,
    value_names,
    whole_of,
    within,
    without_unused_outputs,
)
from distir_relax.layout import DeviceMesh, Partial, R, Shard, print_placements
from distir_relax.sharding.annotation_propagation import spread
from distir_relax.sharding.expert_routing import worked_on
from distir_relax.sharding.factor_selection import FactorChoice, Placed, divides
from distir_relax.sharding.factors import Factoring, factoring_of, is_annotation
from distir_relax.sharding.replicated import asks_for_nothing, laid_out_whole


@dataclass(frozen=True, slots=True)
class Propagate:
    """The pass: global stage in, sharded stage out. `mesh` is used when the module names none.

    It records a `Reason` for each split that annotations ask for, and a `Gather` for each that nobody asked for; of a
    function, those of the call that it is first laid out for.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "sharded"
    mesh: DeviceMesh | None = None

    def run(self, module: Module, factoring: Factoring | None = None) -> Module:
        """Lay out every value of the module.

        `factoring` is that of the entry function with calls written out, for a caller who has it: it does not depend on
        what annotations ask for, so one does for many annotations of the same program. Raises `AnnotationError` when
        there is no mesh or when annotations contradict each other, `PlacementError` when one does not fit its tensor.
        """
        mesh = self.mesh or (module.meshes[0] if module.meshes else None)
        if mesh is None:
            raise AnnotationError(
                "the model has no annotation and no mesh was given",
                hint="mark a tensor with annotate_sharding(tensor, mesh, placement), or pass mesh= and shardings=",
            )
        if asks_for_nothing(module, mesh):
            whole_functions = laid_out_whole(module, mesh)
            return without_unused_outputs(Module("sharded", whole_functions, (mesh,), records=module.records))
        whole = whole_of(module)
        factoring = factoring or factoring_of(module)
        wanted = spread(whole.function, factoring, mesh)
        program = _Program(
            whole.function,
            FactorChoice(factoring, wanted, mesh, worked_on(whole.function)),
            whole.instance,
            names={module.main.name},
        )
        main = _Layout(program, whole.instance, module.main.name).main()
        records = (*module.records, *program.reasons, *program.gathers)
        return without_unused_outputs(Module("sharded", (main, *program.functions), (mesh,), records=records))


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A layout into which a value is brought; `name` is that of the result, or if unasked what its own ends in."""

    target: Placed
    name: str
    where: str
    unasked: bool


@dataclass(frozen=True, slots=True)
class _Take:
    """What a function laid out takes: the operand of this number, brought by its caller into other layouts."""

    operand: int
    conversions: tuple[_Conversion, ...] = ()


@dataclass(frozen=True, slots=True)
class _Callee:
    """A function laid out, with what it `takes`, and what it `gives` for each result of a call: an input or an output.

    The outputs from number `more` on are results in `layouts` that it had to bring them into for itself.
    """

    function: Function
    takes: tuple[_Take, ...]
    gives: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[int, Placed], ...]


@dataclass(slots=True)
class _Program:
    """The whole program, with calls written out, and what was found for its functions."""

    whole: Function
    choice: FactorChoice
    entry: Instance
    names: set[str]
    functions: list[Function] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    callees: dict[object, _Callee] = field(default_factory=dict)
    entry_names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.entry_names = {flat: name for name, flat in self.entry.names.items()}

    def callee(self, instance: Instance, operands: Sequence[Value]) -> _Callee:
        """The function of a call as it is laid out there."""
        lie = tuple(v.dtensor.placements for v in operands)
        key = (instance.function.name, lie, self.choice.reaching(instance))
        if key not in self.callees:
            name = fresh_name(instance.function.name, self.names)
            self.callees[key] = _Layout(self, instance, name).callee(operands)
            self.functions.append(self.callees[key].function)
        return self.callees[key]


@dataclass(slots=True)
class _Layout:
    """Lays out one function, as it is in one of its instances."""

    program: _Program
    instance: Instance
    name: str
    values: dict[str, Value] = field(default_factory=dict)
    """The sharded value that stands for each global value."""
    converted: dict[str, dict[Placed, Value]] = field(default_factory=lambda: defaultdict(dict))
    """What each value was brought into, by how that lies."""
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    inputs: list[Input] = field(default_factory=list)
    takes: dict[str, _Take] = field(default_factory=dict)
    """What each input stands for, where the function has a caller to bring its operands into other layouts."""

    def main(self) -> Function:
        """The entry function: its inputs lie as annotations ask."""
        self._reserve()
        for item in self.instance.function.inputs:
            self._declare(item, self._wish(item.value))
        self._body()
        results = [(o.name, self.values[o.value.name]) for o in self.instance.function.outputs]
        outputs = tuple(Output(name, self._reduced(value)) for name, value in results)
        return Function(self.name, tuple(self.inputs), tuple(self.ops), outputs)

    def _reduced(self, value: Value) -> Value:
        """A result of the program: the sums that are pending in it are made."""
        target = tuple(R if isinstance(p, Partial) else p for p in value.dtensor.placements)
        return self._convert(value, target, f"{value.name.removesuffix('.partial')}.whole", "", unasked=True)

    def callee(self, operands: Sequence[Value]) -> _Callee:
        """The function as it is called with these operands."""
        self._reserve()
        for number, (item, operand) in enumerate(zip(self.instance.function.inputs, operands, strict=True)):
            self._declare(item, operand.dtensor.placements)
            self.takes[item.value.name] = _Take(number)
        self._body()
        results = [self.values[o.value.name] for o in self.instance.function.outputs]
        given = list(dict.fromkeys(v for v in results if v.name not in self.takes))
        again = [(i, target, w) for i, v in enumerate(given) for target, w in self.converted.get(v.name, {}).items()]
        outputs = [*given, *(w for _, _, w in again)]
        used = {v.name for op in self.ops for v in op.operands} | {v.name for v in results}
        inputs = [item for item in self.inputs if item.value.name in used]
        places = {item.value.name: i for i, item in enumerate(inputs)}
        return _Callee(
            Function(self.name, tuple(inputs), tuple(self.ops), tuple(Output(v.name, v) for v in outputs)),
            tuple(self.takes[item.value.name] for item in inputs),
            tuple(("input", places[v.name]) if v.name in places else ("output", given.index(v)) for v in results),
            tuple((number, target) for number, target, _ in again),
        )

    def _reserve(self) -> None:
        function = self.instance.function
        self.names = value_names(function)

    def _declare(self, item: Input, placements: Placed) -> None:
        value = _laid_out(item.value, placements)
        self.values[item.value.name] = value
        self.inputs.append(Input(value, item.role, item.location))

    def _body(self) -> None:
        for op, place in zip(self.instance.function.ops, self.instance.ops, strict=True):
            if isinstance(place, Instance):
                self._call(op, place)
            elif is_annotation(op):
                source, target = self.values[op.operands[0].name], self._wish(op.results[0])
                # What a mark asks for is made where the mark stands, though it may have been made before.
                self.converted[source.name].pop(target, None)
                self.values[op.results[0].name] = self._convert(source, target, op.results[0].name, op.location)
            else:
                self._place(place, op)
        self._reasons()

    def _wish(self, value: Value) -> Placed:
        return self.program.choice.wish(self.instance.names[value.name])

    def _call(self, op: Op, instance: Instance) -> None:
        """The call of the function as it is laid out for these operands."""
        operands = [self.values[v.name] for v in op.operands]
        callee = self.program.callee(instance, operands)
        taken = []
        for take in callee.takes:
            value = operands[take.operand]
            for step in take.conversions:
                where = within(op.location, step.where)
                name = f"{value.name}.{step.name}" if step.unasked else fresh_name(step.name, self.names)
                value = self._convert(value, step.target, name, where, step.unasked)
            taken.append(value)
        results: list[Value | None] = [None] * len(callee.function.outputs)
        for value, (kind, number) in zip(op.results, callee.gives, strict=True):
            if kind == "input":
                self.values[value.name] = taken[number]
                continue
            if (found := results[number]) is None:
                found = results[number] = replace(callee.function.outputs[number].value, name=value.name)
            self.values[value.name] = found
        first = len(results) - len(callee.layouts)
        for place, (number, target) in enumerate(callee.layouts, first):
            source = results[number]
            assert source is not None
            more = replace(callee.function.outputs[place].value, name=fresh_name(f"{source.name}.again", self.names))
            results[place] = self.converted[source.name][target] = more
        made = tuple(v for v in results if v is not None)
        self.ops.append(Op(CALL, tuple(taken), made, {"callee": callee.function.name, **op.task}, op.location))

    def _place(self, number: int, op: Op) -> None:
        """Write the op, number `number` of the whole program, as it is split, with what comes before and after."""
        operands = [self.values[v.name] for v in op.operands]
        made = [tuple(self.converted.get(v.name, ())) for v in operands]
        needs, gives = self.program.choice.choose(number, self.program.whole.ops[number], operands, made)
        moved = tuple(
            self._convert(value, need, f"{value.name}.{op.name.rsplit('.', 1)[-1]}", op.location, unasked=True)
            for value, need in zip(operands, needs, strict=True)
        )
        results, after = [], []
        for value, give in zip(op.results, gives, strict=True):
            pending = [isinstance(p, Partial) for p in give]
            if not any(pending):
                results.append(_laid_out(value, give))
                self.values[value.name] = results[-1]
                continue
            partial = replace(_laid_out(value, give), name=fresh_name(f"{value.name}.partial", self.names))
            results.append(partial)
            wish = self._wish(value)
            target = tuple(
                g if not p else w if divides(w, give) else R for g, w, p in zip(give, wish, pending, strict=True)
            )
            after.append((partial, value, target))
        self.ops.append(Op(op.name, moved, tuple(results), op.attrs, op.location))
        for partial, value, target in after:
            self.values[value.name] = self._convert(partial, target, value.name, op.location)

    def _convert(self, value: Value, target: Placed, name: str, where: str, unasked: bool = False) -> Value:
        """`value` laid out as `target`; a conversion nobody asked for gets a name of its own, else it is `name`."""
        if value.dtensor.placements == target:
            return value
        known = self.converted[value.name]
        if target not in known:
            kind = value.dtensor
            result = Value(fresh_name(name, self.names) if unasked else name, replace(kind, placements=target))
            known[target] = result
            if take := self.takes.get(value.name):
                step = _Conversion(target, name.removeprefix(f"{value.name}.") if unasked else name, where, unasked)
                self.takes[result.name] = replace(take, conversions=(*take.conversions, step))
                role = next(item.role for item in self.inputs if item.value == value)
                self.inputs.append(Input(result, role))
                return result
            if unasked:
                self._note_gather(value, result, name.rsplit(".", 1)[-1], where)
            self.ops.append(Op("redistribute", (value,), (result,), {"placements": print_placements(target)}, where))
        return known[target]

    def _note_gather(self, value: Value, result: Value, user: str, where: str) -> None:
        have, want, kind = value.dtensor.placements, result.dtensor.placements, value.dtensor.tensor
        if any(isinstance(h, Shard) and t == R for h, t in zip(have, want, strict=True)):
            place = within(self.instance.place, where)
            laid_out = print_placements(have)
            self.program.gathers.append(Gather(result.name, value.name, laid_out, kind.bytes, user, place, self.name))

    def _reasons(self) -> None:
        """Why each value lies as it does, with sources named as in this function, or else as in the entry."""
        wanted = self.program.choice.wanted
        own = {flat: name for name, flat in self.instance.names.items()}
        entry = self.program.entry_names
        for name, flat in self.instance.names.items():
            for axis in range(len(wanted.splits[flat])):
                if reason := wanted.reasons.get((flat, axis)):
                    source = own.get(reason.source) or entry.get(reason.source, reason.source)
                    self.program.reasons.append(replace(reason, value=name, source=source, function=self.name))


def _laid_out(value: Value, placements: Placed) -> Value:
    kind = value.tensor
    return Value(value.name, DTensorType(kind.shape, kind.dtype, placements))
