"""Derivation of an incremental program: of a program over a whole sequence, the one over its next tokens and a state.

Every dim along the sequence gets a role: the *new* positions, which a call computes, or *all* of them. The outputs need
the new ones, and demands are propagated backward from there. An op that is parallel along a dim needs the new positions
of its operands (its factor rule says along which dims). Everything else that it reads along the sequence, such as the
keys of attention, it needs at all positions: those that earlier calls have left in the state, and the new ones. What
depends on no input, such as a mask, is computed for all positions instead.

An op that is not parallel along the sequence, and whose operands depend on an input, needs an entry in the op table
that says what it carries from call to call (`IncrementalForm`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeAlias

from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.incremental.roles import (
    OpRoles,
    Positions,
    Roles,
    op_roles,
    restricted_attrs,
    result_types,
    window_extras,
)
from distir_relax.ir import NEXT_ROLE, CachedState, Function, Inline, Module, Op, Output, TensorType, Value, dependents
from distir_relax.ir.symbols import check_symbols, module_symbols, specialize, specialize_op
from distir_relax.layout import Guard, Symbol, assuming, is_always, size_of
from distir_relax.ops import Builder, IncrementalForm, IncrementalStep, Trait, lookup

Variant: TypeAlias = tuple[str, Roles]
"""A value of the full program, by name, with the roles that something needs it in."""


@dataclass(frozen=True, slots=True)
class Incremental:
    """Replace a program over `sequence` tokens by one over ``new`` tokens, after ``past`` ones.

    The inputs and outputs along the sequence have the new positions only. For each state there is a further
    input, with what earlier calls have left, a further output with its next value, and a record `CachedState`. Before
    the first call all states are empty, or zero. Functions are inlined.

    The result is that of the full program only if no position depends on later ones, which attention leaves to its
    mask: see `interpret.causality`.

    Raises `UnsupportedOpError` for an op that mixes positions in a way that its entry does not describe, and
    `DistIRError` if the program has no size of this name, or has one named ``past`` or ``new``, and for an input or
    output with more or fewer positions than the sequence.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    sequence: str = "sequence"

    def run(self, module: Module) -> Module:
        """Return the incremental program."""
        symbols = module_symbols(module)
        check_symbols([self.sequence], symbols)
        if used := symbols.keys() & {"past", "new"} - {self.sequence}:
            raise DistIRError(f"the program has a size {min(used)!r}, the name of one of its incremental form")
        sequence = symbols[self.sequence]
        most = sequence.high
        past = Symbol("past", 0, None if most is None else most - 1, sequence.nearest(sequence.typical) - 1)
        positions = Positions(sequence, size_of(past), size_of(Symbol("new", 1, most, 1)))
        _check_lengths(module.main, positions)
        guards = [r for r in specialize(module, {self.sequence: positions.total}).records if isinstance(r, Guard)]
        if most is not None and is_always(positions.total, "<=", most) is None:
            guards.append(Guard(positions.total, "<=", most, True))
        with assuming(guards):
            derivation = _Derivation(Inline().run(module).main, positions)
        return Module("global", (derivation.result(),), module.meshes, records=(*derivation.records(), *guards))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a variant of a value is made: from these other variants, by this function."""

    needs: tuple[Variant, ...]
    emit: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _State:
    """An input that earlier calls have left, and its next value; `dim` is that of past positions, -1 for none."""

    input: Value
    dim: int
    next: Value | None = None

    @property
    def output(self) -> str:
        return f"{self.input.name}.next"


class _Derivation:
    """The derivation of a function: demands backward, then ops forward."""

    def __init__(self, function: Function, positions: Positions) -> None:
        self.full, self.positions = function, positions
        self.builder = Builder()
        self.made: dict[Variant, Value] = {}
        self._states: list[_State] = []
        # The values that depend on an input or a state, rather than on sizes and weights alone.
        self._varying = dependents(function, (i.value.name for i in function.inputs if i.role in ("input", "state")))
        self._demands: dict[str, set[Roles]] = {}
        # In the order of the demands; emission is in the reverse order.
        self._plans: list[_Plan] = []
        for output in function.outputs:
            self._demands.setdefault(output.value.name, set()).add(self._new(output.value))
        for op in reversed(function.ops):
            self._plan_op(op)
        self._plan_inputs()
        for plan in reversed(self._plans):
            plan.emit()

    def result(self) -> Function:
        """Return the incremental function; the next values of its states come after the other outputs."""
        outputs = [replace(o, value=self.made[o.value.name, self._new(o.value)]) for o in self.full.outputs]
        for state in self._states:
            if state.next is not None:
                outputs.append(Output(state.output, state.next, role=NEXT_ROLE, of=state.input.name))
        return self.builder.function(self.full.name, outputs)

    def records(self) -> list[CachedState]:
        """Return the records of its states."""
        return [CachedState(s.input.name, s.output, max(s.dim, 0), s.dim >= 0) for s in self._states]

    def _new(self, value: Value) -> Roles:
        return self.positions.roles(value.tensor, "new")

    # Demands, backward

    def _demand(self, plan: _Plan) -> None:
        self._plans.append(plan)
        for name, roles in plan.needs:
            self._demands.setdefault(name, set()).add(roles)

    def _plan_op(self, op: Op) -> None:
        todo = [(n, roles) for n, v in enumerate(op.results) for roles in sorted(self._demands.get(v.name, ()))]
        derived = list[_Plan]()
        instances = dict[tuple[Roles, ...], OpRoles]()
        for number, roles in todo:
            value = op.results[number]
            if self._is_kept(op, value, roles):
                derived.append(self._appended(value, roles, op.location))
            elif (found := self._roles(op, number, roles)) is not None:
                instances.setdefault(found.results, found)
                continue
            else:
                derived.append(self._sliced(op, value, roles))
            (_, needed), *_ = derived[-1].needs
            if (number, needed) not in todo:
                todo.append((number, needed))
        # Slices of the op's results, and states they are appended to, are emitted after it.
        for plan in derived:
            self._demand(plan)
        for found in instances.values():
            needs = tuple((v.name, r) for v, r in zip(op.operands, found.operands, strict=True))
            self._demand(_Plan(needs, partial(self._emit, op, found)))

    def _roles(self, op: Op, number: int, roles: Roles) -> OpRoles | None:
        """Return the roles of an op; None if it makes these positions of its result of all positions."""
        found = op_roles(op, number, roles, self.positions)
        # A value that depends on no input needs no state: it can be made again.
        is_again = found is not None and not found.is_parallel and op.results[number].name not in self._varying
        return None if is_again and _form(op).carries else found

    def _is_kept(self, op: Op, value: Value, roles: Roles) -> bool:
        """Return whether all positions of a value are kept, rather than made of those of the op's operands.

        An op that only moves elements of one operand, and makes them no fewer, is applied to all positions of that.
        """
        if value.name not in self._varying or "new" in roles or "all" not in roles:
            return False
        dims = [size for size, role in zip(value.tensor.shape, roles, strict=True) if role == "all"]
        if len(dims) > 1 or not self.positions.is_sequence(dims[0]):
            return False
        if len(op.results) > 1 or Trait.MOVES not in lookup(op.name, op.location).traits:
            return True
        varying = [v for v in op.operands if v.name in self._varying]
        return len(varying) > 1 or varying[0].tensor.generic.elements > value.tensor.generic.elements

    def _appended(self, value: Value, roles: Roles, location: str) -> _Plan:
        """Append the new positions of a value to those of a state."""
        new, dim = self._new(value), roles.index("all")
        kind = self.positions.type(value.tensor, roles)
        shape = tuple(self.positions.past if d == dim else n for d, n in enumerate(kind.shape))

        def emit() -> None:
            self._at(location, f"{value.name}.all")
            past = self._declare(TensorType(shape, kind.dtype), f"{value.name}.past", dim)
            joined = self.builder.emit("append", past, self.made[value.name, new], axis=dim)
            self._keep(past, joined)
            self.made[value.name, roles] = joined

        return _Plan(((value.name, new),), emit)

    def _sliced(self, op: Op, value: Value, roles: Roles) -> _Plan:
        """Take the new positions of a value that depends on no input from all of them. Raises for another."""
        every = self.positions.roles(value.tensor, "all")
        dims = tuple(d for d, role in enumerate(roles) if role == "new")
        extras = [self.positions.extra(value.tensor.shape[d]) for d in dims]
        if value.name in self._varying or any(extra is None or extra < 0 for extra in extras):
            raise self._mixes(op)
        ends = tuple(self.positions.size(value.tensor.shape[d], "all") for d in dims)

        def emit() -> None:
            self._at(op.location, value.name)
            self.made[value.name, roles] = self.builder.emit(
                "strided_slice", self.made[value.name, every], axes=dims, begin=(self.positions.past,) * len(dims),
                end=ends, strides=(1,) * len(dims),
            )  # fmt: skip

        return _Plan(((value.name, every),), emit)

    def _plan_inputs(self) -> None:
        for item in self.full.inputs:
            value, new = item.value, self._new(item.value)
            kept = self._demands.get(value.name, set()) - {new}
            declared = self.builder.input(value.name, self.positions.type(value.tensor, new), item.role, item.location)
            self.made[value.name, new] = declared
            self._plans += [self._appended(value, roles, item.location) for roles in sorted(kept)]

    # Ops, forward

    def _emit(self, op: Op, roles: OpRoles) -> None:
        self._at(op.location, op.results[0].name)
        operands = [self.made[v.name, r] for v, r in zip(op.operands, roles.operands, strict=True)]
        kinds = result_types(op, roles, self.positions)
        if roles.is_parallel:
            attrs = restricted_attrs(op, roles, self.positions, operands)
            results = self.builder.emit(op.name, *operands, **attrs)
        else:
            attrs = dict(specialize_op(op, {self.positions.sequence.name: self.positions.total}).attrs)
            past, new = self.positions.past, self.positions.new
            extra = self.positions.extra(op.results[0].tensor.shape[roles.dim]) or 0
            extras = window_extras(op, roles.dim, self.positions)
            step = IncrementalStep(
                self.builder, operands, attrs, kinds[0], roles.dim, extra, extras, past, new, self._declare, self._keep
            )
            results = _form(op).compute(step)
        results = results if isinstance(results, tuple) else (results,)
        for value, kind, result, several in zip(op.results, kinds, results, roles.results, strict=True):
            if result.tensor != kind:
                raise self._mixes(op, f": its new positions are {result.tensor}, expected {kind}")
            self.made[value.name, several] = result

    def _at(self, location: str, hint: str) -> None:
        self.builder.location, self.builder.hint = location, hint

    # States

    def _declare(self, kind: TensorType, name: str, dim: int = -1) -> Value:
        """Declare a state; `dim` is that of past positions, -1 for none."""
        value = self.builder.input(name, kind, "input", self.builder.location)
        self._states.append(_State(value, dim))
        return value

    def _keep(self, state: Value, value: Value) -> None:
        """Let `value` be what the next call finds in a state."""
        self._states = [replace(s, next=value) if s.input == state else s for s in self._states]

    def _mixes(self, op: Op, reason: str = "") -> UnsupportedOpError:
        return UnsupportedOpError(
            f"{op.name} mixes positions along {self.positions.sequence}{reason}",
            op.location,
            "a program that continues a sequence reads earlier positions by causal attention, or by an op whose entry"
            " in the op table says what it carries",
        )


def _check_lengths(main: Function, positions: Positions) -> None:
    """Raise `DistIRError` for an input or output with another number of positions than the sequence."""
    for name, value in [*((i.value.name, i.value) for i in main.inputs), *((o.name, o.value) for o in main.outputs)]:
        if any(positions.extra(size) for size in value.tensor.shape):
            raise DistIRError(
                f"expected inputs and outputs with one position for each of {positions.sequence}, found {name} "
                f"{value.tensor}",
                hint="pad or slice it inside of the model",
            )


def _form(op: Op) -> IncrementalForm:
    form = lookup(op.name, op.location).incremental
    assert form is not None
    return form
