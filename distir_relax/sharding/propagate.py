"""Sharding propagation: from annotations to layouts of all values; global stage in, sharded stage out.

Annotations are first propagated over the factors of ops, forwards and backwards, through the inlined program
(`annotation_propagation`). Then, op by op in program order, each op is split along the factor that moves the fewest
bytes (`factor_selection`). A `redistribute` is inserted before an op whose operand has another layout; a pending
reduction becomes an explicit ``I`` value followed by its `redistribute` (the RFC's legalization).

A function is specialized for each combination of operand layouts and annotations that reach into it. Its callers
convert operands to the layouts that it needs, so that a conversion needed by several calls happens once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from distir_relax.errors import AnnotationError
from distir_relax.ir import (
    CALL,
    PLACEMENTS,
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
    absolute_location,
    fresh_name,
    inlined_main,
    remove_unused_outputs,
    value_names,
)
from distir_relax.layout import DeviceMesh, Partial, Placement, R, Shard, is_always, print_placements
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.annotation_propagation import propagate_annotations
from distir_relax.sharding.expert_routing import grouped_operands
from distir_relax.sharding.factor_selection import FactorSelector, Placed, bytes_before_repeats, is_compatible
from distir_relax.sharding.factors import Factoring, factoring_of, is_annotation
from distir_relax.sharding.replicated import is_fully_replicated, replicate_all

T = TypeVar("T")

_Choice = tuple[list[Placed], list[Placed]]
# The layouts of an op's operands and results.


@dataclass(frozen=True, slots=True)
class Propagate:
    """Pass: global stage in, sharded stage out. `mesh` is the default if the module has none.

    Records a `Gather` for each implicit gather and, with `reasons`, a `Reason` for each split that annotations request;
    for a function, those of the first call that it is specialized for. `ring` is as in `FactorSelector`.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "sharded"
    mesh: DeviceMesh | None = None
    reasons: bool = True
    ring: str = "auto"

    def run(self, module: Module, factoring: Factoring | None = None) -> Module:
        """Compute the layouts of all values of the module.

        `factoring` is that of the inlined entry function, if already computed: it does not depend on the annotations.
        Raises `AnnotationError` if there is no mesh or annotations contradict each other, `PlacementError` if one does
        not fit its tensor.
        """
        mesh = self.mesh or (module.meshes[0] if module.meshes else None)
        if mesh is None:
            raise AnnotationError(
                "the model has no annotation and no mesh was given",
                hint="give a strategy such as 1/2/1/1, a mesh and shardings, or annotate a tensor (annotate_sharding)",
            )
        if is_fully_replicated(module, mesh):
            whole_functions = replicate_all(module, mesh)
            return remove_unused_outputs(Module("sharded", whole_functions, (mesh,), records=module.records))
        inlined = inlined_main(module)
        factoring = factoring or factoring_of(module)
        targets = propagate_annotations(inlined.function, factoring, mesh)
        grouped, repeated = grouped_operands(inlined.function), bytes_before_repeats(inlined.function.ops)
        program = _Program(
            inlined.function,
            FactorSelector(factoring, targets, mesh, grouped, self.ring, repeated),
            inlined.instance,
            names={module.main.name},
            records_reasons=self.reasons,
        )
        main = program.laid_out(inlined.instance, module.main.name, _Layout.main)
        records = (*module.records, *program.reasons, *program.gathers)
        return remove_unused_outputs(Module("sharded", (main, *program.functions), (mesh,), records=records))


@dataclass(frozen=True, slots=True)
class _Reshard:
    """A layout to convert a value to; `name` is that of the result, or the suffix of one if the reshard is implicit."""

    target: Placed
    name: str
    where: str
    implicit: bool


@dataclass(frozen=True, slots=True)
class _Parameter:
    """An input of a specialized function: the operand of this number, converted by the caller."""

    operand: int
    reshards: tuple[_Reshard, ...] = ()


@dataclass(frozen=True, slots=True)
class _Callee:
    """A specialized function, its inputs, and for each result of a call an input or an output.

    The outputs from number `len(outputs) - len(layouts)` on are results converted to `layouts` inside the function.
    """

    function: Function
    parameters: tuple[_Parameter, ...]
    gives: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[int, Placed], ...]


@dataclass(slots=True)
class _Program:
    """The inlined program, and the functions specialized so far."""

    inlined: Function
    selector: FactorSelector
    entry: Instance
    names: set[str]
    records_reasons: bool
    functions: list[Function] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    callees: dict[object, _Callee] = field(default_factory=dict)
    entry_names: dict[str, str] = field(init=False)
    instance_keys: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.instance_keys = self.selector.instance_keys(self.entry)
        self.entry_names = {flat: name for name, flat in self.entry.names.items()}

    def callee(self, instance: Instance, operands: Sequence[Value]) -> _Callee:
        """Return the function specialized for a call."""
        layouts = tuple(v.dtensor.placements for v in operands)
        key = (instance.function.name, layouts, self.instance_keys[id(instance)])
        if key not in self.callees:
            name = fresh_name(instance.function.name, self.names)
            self.callees[key] = self.laid_out(instance, name, lambda layout: layout.callee(operands))
            self.functions.append(self.callees[key].function)
        return self.callees[key]

    def laid_out(self, instance: Instance, name: str, build: Callable[[_Layout], T]) -> T:
        """Return what `build` makes of the layout of a function.

        Ops are split one after the other. If one would be split otherwise, given the layouts to which later ops convert
        its operands, the function is laid out again with these in view.
        """
        reasons, gathers = len(self.reasons), len(self.gathers)
        layout = _Layout(self, instance, name)
        result = build(layout)
        if not (foreseen := layout.better_reshards()):
            return result
        del self.reasons[reasons:], self.gathers[gathers:]
        return build(_Layout(self, instance, name, foreseen))


@dataclass(slots=True)
class _Layout:
    """Lays out one function, for one of its instances."""

    program: _Program
    instance: Instance
    name: str
    foreseen: Mapping[str, Sequence[Placed]] = field(default_factory=dict)
    """Layouts to which ops will convert the operands of that name, which cost nothing for other ops then."""
    values: dict[str, Value] = field(default_factory=dict)
    """The sharded value of each global value."""
    reshards: dict[str, dict[Placed, Value]] = field(default_factory=lambda: defaultdict(dict))
    """Resharded copies of each value, by layout."""
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    inputs: list[Input] = field(default_factory=list)
    parameters: dict[str, _Parameter] = field(default_factory=dict)
    """The parameter of each input, if the function has callers that can convert its operands."""
    choices: list[tuple[int, Op, list[Value], _Choice]] = field(default_factory=list)
    """The ops so far: the number of each in the inlined program, its operands here, and how it is split."""

    def main(self) -> Function:
        """Build the entry function: its inputs have the annotated layouts."""
        self._reserve()
        for item in self.instance.function.inputs:
            self._declare(item, tuple(R if _is_interleaved(p) else p for p in self._target_layout(item.value)))
        self._body()
        self._place_states()
        results = [(o, self.values[o.value.name]) for o in self.instance.function.outputs]
        outputs = tuple(replace(o, value=self._complete(value), layout=None) for o, value in results)
        return Function(self.name, tuple(self.inputs), tuple(self.ops), outputs)

    def _place_states(self) -> None:
        """Place states as the ops that update them need them, if nothing else does, and nobody has placed them.

        An update writes to the state itself: of one that is resharded before, only the copy would be updated.
        """
        readers: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            for value in op.operands:
                readers[value.name].append(op)
        placed: dict[str, Value] = {}
        for number, item in enumerate(self.inputs):
            name = item.value.name
            reshard = readers[name][0] if item.role == "state" and len(readers[name]) == 1 else None
            if reshard is None or reshard.callee or name in self.program.selector.targets.pinned:
                continue
            copy = reshard.results[0]
            users = readers[copy.name]
            if Trait.REDISTRIBUTION in lookup(reshard.name).traits and len(users) == 1 and _updates(users[0], copy):
                placed[copy.name] = Value(name, copy.type)
                self.inputs[number] = replace(item, value=placed[copy.name])
        if placed:
            kept = (op for op in self.ops if op.results[0].name not in placed)
            self.ops = [replace(op, operands=tuple(placed.get(v.name, v) for v in op.operands)) for op in kept]

    def _complete(self, value: Value) -> Value:
        """Reduce a result of the program if it is partial, and gather one of which a device has too many intervals."""
        target = tuple(R if isinstance(p, Partial) or _is_interleaved(p) else p for p in value.dtensor.placements)
        return self._convert(value, target, f"{value.name.removesuffix('.partial')}.whole", "", implicit=True)

    def callee(self, operands: Sequence[Value]) -> _Callee:
        """Build the function for these operands."""
        self._reserve()
        for number, (item, operand) in enumerate(zip(self.instance.function.inputs, operands, strict=True)):
            self._declare(item, operand.dtensor.placements)
            self.parameters[item.value.name] = _Parameter(number)
        self._body()
        results = [self.values[o.value.name] for o in self.instance.function.outputs]
        distinct = list(dict.fromkeys(v for v in results if v.name not in self.parameters))
        extra = [
            (i, target, w)
            for i, v in enumerate(distinct)
            for target, w in self.reshards.get(v.name, {}).items()
            # Gathered activations of all calls would be kept until the backward; indices are few bytes.
            if "float" not in v.dtensor.dtype or not _gathered_axes(v, target)
        ]  # fmt: skip
        outputs = [*distinct, *(w for _, _, w in extra)]
        used_names = {v.name for op in self.ops for v in op.operands} | {v.name for v in results}
        inputs = [item for item in self.inputs if item.value.name in used_names]
        index = {item.value.name: i for i, item in enumerate(inputs)}
        return _Callee(
            Function(self.name, tuple(inputs), tuple(self.ops), tuple(Output(v.name, v) for v in outputs)),
            tuple(self.parameters[item.value.name] for item in inputs),
            tuple(("input", index[v.name]) if v.name in index else ("output", distinct.index(v)) for v in results),
            tuple((number, target) for number, target, _ in extra),
        )

    def _reserve(self) -> None:
        function = self.instance.function
        self.names = value_names(function)

    def _declare(self, item: Input, placements: Placed) -> None:
        value = _with_layout(item.value, placements)
        self.values[item.value.name] = value
        self.inputs.append(Input(value, item.role, item.location))

    def _body(self) -> None:
        for op, place in zip(self.instance.function.ops, self.instance.ops, strict=True):
            if isinstance(place, Instance):
                self._call(op, place)
            elif is_annotation(op):
                source, target = self.values[op.operands[0].name], self._target_layout(op.results[0])
                # An annotation's conversion is at the annotation, even if the layout existed before.
                self.reshards[source.name].pop(target, None)
                self.values[op.results[0].name] = self._convert(source, target, op.results[0].name, op.location)
            else:
                self._add_op(place, op)
        if self.program.records_reasons:
            self._record_reasons()

    def _target_layout(self, value: Value) -> Placed:
        return self.program.selector.target_layout(self.instance.names[value.name])

    def _call(self, op: Op, instance: Instance) -> None:
        """Add a call of the function specialized for these operands."""
        operands = [self.values[v.name] for v in op.operands]
        callee = self.program.callee(instance, operands)
        arguments = []
        for parameter in callee.parameters:
            value = operands[parameter.operand]
            for step in parameter.reshards:
                where = absolute_location(op.location, step.where)
                name = f"{value.name}.{step.name}" if step.implicit else fresh_name(step.name, self.names)
                value = self._convert(value, step.target, name, where, step.implicit)
            arguments.append(value)
        results: list[Value | None] = [None] * len(callee.function.outputs)
        for value, (kind, number) in zip(op.results, callee.gives, strict=True):
            if kind == "input":
                self.values[value.name] = arguments[number]
                continue
            if (result := results[number]) is None:
                result = results[number] = replace(callee.function.outputs[number].value, name=value.name)
            self.values[value.name] = result
        first_extra = len(results) - len(callee.layouts)
        for index, (number, target) in enumerate(callee.layouts, first_extra):
            source = results[number]
            assert source is not None
            extra = replace(callee.function.outputs[index].value, name=fresh_name(f"{source.name}.again", self.names))
            results[index] = self.reshards[source.name][target] = extra
        outputs = tuple(v for v in results if v is not None)
        self.ops.append(Op(CALL, tuple(arguments), outputs, {"callee": callee.function.name, **op.task}, op.location))

    def _add_op(self, number: int, op: Op) -> None:
        """Add op number `number` of the inlined program, split, with reshards before and after it."""
        operands = [self.values[v.name] for v in op.operands]
        reshards = [self.reshards.get(v.name, ()) for v in operands]
        ins, outs = choice = self._choose(number, op, operands, reshards)
        self.choices.append((number, op, operands, choice))
        new_operands = tuple(
            self._convert(value, layout, f"{value.name}.{op.name.rsplit('.', 1)[-1]}", op.location, implicit=True)
            for value, layout in zip(operands, ins, strict=True)
        )
        results, reductions = [], []
        for value, layout in zip(op.results, outs, strict=True):
            sums = [isinstance(p, Partial) for p in layout]
            if not any(sums):
                results.append(_with_layout(value, layout))
                self.values[value.name] = results[-1]
                continue
            partial = replace(_with_layout(value, layout), name=fresh_name(f"{value.name}.partial", self.names))
            results.append(partial)
            goal = self._target_layout(value)
            target = tuple(
                g if not p else w if is_compatible(w, layout) else R for g, w, p in zip(layout, goal, sums, strict=True)
            )
            reductions.append((partial, value, target))
        self.ops.append(Op(op.name, new_operands, tuple(results), op.attrs, op.location))
        for partial, value, target in reductions:
            self.values[value.name] = self._convert(partial, target, value.name, op.location)

    def _choose(self, number: int, op: Op, operands: Sequence[Value], reshards: Sequence[Iterable[Placed]]) -> _Choice:
        """Return the layouts of the operands and results of an op, given conversions of each operand."""
        available = [
            tuple(dict.fromkeys((*layouts, *self.foreseen.get(value.name, ()))))
            for layouts, value in zip(reshards, op.operands, strict=True)
        ]
        return self.program.selector.choose(number, self.program.inlined.ops[number], operands, available)

    def better_reshards(self) -> dict[str, list[Placed]]:
        """Return the layouts that operands would be converted to if each op knew of those of all others.

        Empty if no op would be split otherwise, and for a function that calls others, which was laid out with them.
        """
        if any(isinstance(place, Instance) for place in self.instance.ops):
            return {}
        users: Counter[tuple[str, Placed]] = Counter()
        for _, _, operands, (layouts, _) in self.choices:
            users.update({(v.name, layout) for v, layout in zip(operands, layouts, strict=True)})
        is_better = False
        needed: dict[str, list[Placed]] = defaultdict(list)
        for number, op, operands, choice in self.choices:
            own = {(v.name, layout) for v, layout in zip(operands, choice[0], strict=True)}
            of_others = [
                [
                    layout
                    for layout in self.reshards.get(v.name, ())
                    if users[v.name, layout] > ((v.name, layout) in own)
                ]
                for v in operands
            ]
            if any(of_others):
                best = self._choose(number, op, operands, of_others)
                is_better |= best != choice
                for value, layout in zip(op.operands, best[0], strict=True):
                    needed[value.name].append(layout)
        return needed if is_better else {}

    def _convert(self, value: Value, target: Placed, name: str, where: str, implicit: bool = False) -> Value:
        """Convert `value` to `target`; the result of an implicit reshard gets a fresh name, else it is `name`."""
        if value.dtensor.placements == target:
            return value
        cache = self.reshards[value.name]
        if target not in cache:
            user = name.rsplit(".", 1)[-1]
            if implicit and (repeated := self._repeated(value, target, user, where)) is not None:
                cache[target] = repeated
                return repeated
            kind = value.dtensor
            result = Value(fresh_name(name, self.names) if implicit else name, replace(kind, placements=target))
            cache[target] = result
            if parameter := self.parameters.get(value.name):
                reshard = _Reshard(target, name.removeprefix(f"{value.name}.") if implicit else name, where, implicit)
                self.parameters[result.name] = replace(parameter, reshards=(*parameter.reshards, reshard))
                role = next(item.role for item in self.inputs if item.value == value)
                self.inputs.append(Input(result, role))
                return result
            if implicit:
                self._record_gather(value, result, user, where)
            self.ops.append(Op("redistribute", (value,), (result,), {PLACEMENTS: target}, where))
        return cache[target]

    def _repeated(self, value: Value, target: Placed, user: str, where: str) -> Value | None:
        """Return a value that is gathered for a `user`, moved again from a gathered operand that is smaller.

        None if there is none. Keys that serve several heads of queries are gathered before they are repeated.
        """
        axes = _gathered_axes(value, target)
        if len(axes) < sum(a != b for a, b in zip(value.dtensor.placements, target, strict=True)):
            return None
        chain: list[Op] = []
        best, moved = value, 0
        source = value
        while all(isinstance(source.dtensor.placements[i], Shard) for i in axes):
            if is_always(source.dtensor.tensor.bytes, "<", best.dtensor.tensor.bytes):
                best, moved = source, len(chain)
            op = next((op for op in reversed(self.ops) if source in op.results), None)
            if op is None or op.callee or len(op.operands) != 1 or Trait.MOVES not in lookup(op.name).traits:
                break
            chain.append(op)
            source = op.operands[0]
        if not moved:
            return None
        whole = tuple(R if i in axes else p for i, p in enumerate(best.dtensor.placements))
        value = self._convert(best, whole, f"{best.name}.{user}", where, implicit=True)
        for op in reversed(chain[:moved]):
            kind = op.results[0].dtensor
            placements = tuple(R if i in axes else p for i, p in enumerate(kind.placements))
            name = fresh_name(f"{op.results[0].name}.{user}", self.names)
            self.ops.append(
                replace(op, operands=(value,), results=(Value(name, replace(kind, placements=placements)),))
            )
            value = self.ops[-1].results[0]
        return value

    def _record_gather(self, value: Value, result: Value, user: str, where: str) -> None:
        if axes := _gathered_axes(value, result.dtensor.placements):
            location = absolute_location(self.instance.place, where)
            layout, size = print_placements(value.dtensor.placements), value.dtensor.tensor.bytes
            gathered = tuple(self.program.selector.mesh.axes[i] for i in axes)
            self.program.gathers.append(
                Gather(result.name, value.name, layout, size, user, location, self.name, gathered)
            )

    def _record_reasons(self) -> None:
        """Record the reasons of all layouts, with sources named as in this function, or else as in the entry."""
        targets = self.program.selector.targets
        names_here = {flat: name for name, flat in self.instance.names.items()}
        entry = self.program.entry_names
        for name, flat in self.instance.names.items():
            for axis in range(len(targets.slots)):
                if cause := targets.cause(flat, axis):
                    annotation, op, factor, _ = cause
                    source = targets.source(cause)
                    via = (op.name, factor) if source and op is not None else ("", "")
                    source = names_here.get(source) or entry.get(source, source)
                    self.program.reasons.append(Reason(name, axis, annotation, *via, source, self.name))


def _with_layout(value: Value, placements: Placed) -> Value:
    kind = value.tensor
    return Value(value.name, DTensorType(kind.shape, kind.dtype, placements))


def _gathered_axes(value: Value, target: Placed) -> list[int]:
    """Return the mesh axes that split a value, and along which a conversion makes it whole."""
    placements = zip(value.dtensor.placements, target, strict=True)
    return [i for i, (before, after) in enumerate(placements) if isinstance(before, Shard) and after == R]


def _updates(op: Op, value: Value) -> bool:
    """Return whether an op updates a value in place."""
    return not op.callee and lookup(op.name, op.location).updates and op.operands[0] == value


def _is_interleaved(placement: Placement) -> bool:
    """Whether a device has a symbolic number of intervals of a dim, which inputs and outputs must not have."""
    return isinstance(placement, Shard) and placement.cut is not None and placement.cut.interleaved is not None
