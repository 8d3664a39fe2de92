"""Results of expansions that a function takes from an earlier call of another (`Expansion.again`).

The gradient of a block has ops on the values that its forward has kept. Where one of these is equal to an op that an
expansion in the forward emitted, its results are additional outputs of the forward, and inputs of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.ir import Attribute, Function, Input, Op, Output, Value, fresh_name, value_names
from distir_relax.lowering.distributed_builder import SpmdBuilder
from distir_relax.ops import NotEarlier


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier call as seen from a later one: the expansions of its function, and by which names there the later
    function's inputs go."""

    function: str
    expansions: ExpansionEmitter
    names: Mapping[str, str]

    @classmethod
    def of(
        cls, call: Op, function: Function, expansions: ExpansionEmitter, inputs: Sequence[Input],
        operands: Sequence[Value],
    ) -> Earlier:  # fmt: skip
        """Return a call of a lowered function, as seen from one whose `inputs` are these `operands`."""
        there = {value.name: output.value.name for value, output in zip(call.results, function.outputs, strict=True)}
        there |= {value.name: item.value.name for value, item in zip(call.operands, function.inputs, strict=True)}
        pairs = zip(inputs, operands, strict=True)
        names = {item.value.name: there[value.name] for item, value in pairs if value.name in there}
        return cls(function.name, expansions, names)

    @property
    def key(self) -> object:
        """What the lowering of the later function depends on."""
        return self.function, tuple(sorted(self.names.items()))


@dataclass(slots=True)
class ExpansionEmitter:
    """Adds the ops of expansions in one function (`ops.Emitter`)."""

    builder: SpmdBuilder
    before: Earlier | None = None
    made: dict[object, Any] = field(default_factory=dict)
    """The last results of an op, by its operands and attributes."""
    others: dict[object, tuple[Value, ...]] = field(default_factory=dict)
    """The results of ops that are in no expansion."""
    has_asked: bool = False
    """Whether it depends on the earlier call."""
    _first: dict[str, str] = field(default_factory=dict)
    """The name of the first value that is equal to one, for those that are not the first."""
    _names: dict[str, str] = field(default_factory=dict)
    """The names in the earlier function of values of this one."""
    _taken: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    """Pairs of a value of the earlier function and the same one here, by its name here."""

    def __post_init__(self) -> None:
        if self.before is not None:
            self._names = dict(self.before.names)

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op; return its result or the tuple of its results."""
        key = self._key(name, (value.name for value in operands), attrs)
        results = self.builder.emit(name, *operands, **attrs)
        if key in self.made:
            pairs = zip(_values(results), _values(self.made[key]), strict=True)
            self._first |= {value.name: self._first.get(other.name, other.name) for value, other in pairs}
        self.made[key] = results
        return results

    def earlier(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Return the last results of an equal op, also of the earlier function. Raises `NotEarlier`."""
        key = self._key(name, (value.name for value in operands), attrs)
        if key not in self.made:
            self.has_asked = True
            found = None
            if self.before is not None and all(value.name in self._names for value in operands):
                there = self.before.expansions
                found = there.made.get(there._key(name, (self._names[value.name] for value in operands), attrs))
            if found is None:
                raise NotEarlier
            mine = tuple(Value(self.builder.fresh(value.name), value.type) for value in _values(found))
            for value, own in zip(_values(found), mine, strict=True):
                self._names[own.name] = value.name
                self._taken[own.name] = value, own
            self.made[key] = mine if isinstance(found, tuple) else mine[0]
        return self.made[key]

    def note(self, op: Op) -> None:
        """Note an op that is in no expansion: if the earlier function has an equal one, results are its results."""
        operands = [value.name for value in op.operands]
        self.others[self._key(op.name, operands, op.attrs)] = op.results
        if self.before is not None and all(name in self._names for name in operands):
            there = self.before.expansions
            found = there.others.get(there._key(op.name, (self._names[name] for name in operands), op.attrs), ())
            self._names |= {own.name: value.name for own, value in zip(op.results, found, strict=False)}

    def taken(self, used: Iterable[str]) -> tuple[list[Input], list[Value]]:
        """Return the inputs for earlier values that are among those `used`, and the values in the earlier function."""
        pairs = [self._taken[name] for name in dict.fromkeys(used) if name in self._taken]
        return [Input(mine, "input") for _, mine in pairs], [value for value, _ in pairs]

    def _key(self, name: str, operands: Iterable[str], attrs: Mapping[str, Attribute]) -> object:
        return name, tuple(self._first.get(value, value) for value in operands), tuple(sorted(attrs.items()))


def _values(results: Any) -> tuple[Value, ...]:
    return results if isinstance(results, tuple) else (results,)


@dataclass(slots=True)
class EarlierResults:
    """The additional outputs of functions, by their names, and the values that they have in calls."""

    outputs: dict[str, dict[str, Value]] = field(default_factory=dict)
    _calls: dict[tuple[str, str], dict[str, Value]] = field(default_factory=dict)
    """The values of additional outputs, by the calling function and the first result of the call."""

    def of_call(self, builder: SpmdBuilder, caller: str, call: Op, values: Iterable[Value]) -> list[Value]:
        """Return what values of the called function are in the caller."""
        results = self._calls.setdefault((caller, call.results[0].name), {})
        outputs = self.outputs.setdefault(str(call.callee), {})
        for value in values:
            outputs[value.name] = value
            if value.name not in results:
                results[value.name] = Value(builder.fresh(value.name), value.type)
        return [results[value.name] for value in values]

    def added(self, function: Function) -> Function:
        """Return a function with its additional outputs, and calls with those of others."""
        taken: set[str] = set()
        ops = []
        for op in function.ops:
            if outputs := self.outputs.get(op.callee) if op.callee else None:
                taken = taken or value_names(function)
                known = self._calls.get((function.name, op.results[0].name), {})
                more = (
                    known.get(name) or Value(fresh_name(name, taken), value.type) for name, value in outputs.items()
                )
                op = replace(op, results=(*op.results, *more))
            ops.append(op)
        own = (Output(name, value) for name, value in self.outputs.get(function.name, {}).items())
        return replace(function, ops=tuple(ops), outputs=(*function.outputs, *own))
