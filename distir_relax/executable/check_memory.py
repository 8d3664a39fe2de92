"""Checks of memory in the executable stage, which share no code with the pass that plans it.

A function is run step by step, with the storage of each value: whose elements it has, and whether they are still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.errors import VerificationError
from distir_relax.executable.hoist import PREPARE, numbers_of
from distir_relax.ir import PACKED, Function, Module, Op, Value
from distir_relax.ops import Appending, Overwriting, Packed, Trait, lookup


def check_memory(module: Module) -> None:
    """Raise `VerificationError` for a value that is used when it is no longer in memory, or another is in its place.

    - nothing is used after its last use, which is no output, and nothing that is unused is used; what all calls need,
      or the code of an op contains, has no last use;
    - a result is written into an operand of its type, which is neither an input nor a value that may be read through
      another name, which has each element once, and which nothing reads afterwards, views included; nor does anything
      read what an op has updated in place;
    - packed weights are operands of ops that take them packed, and of calls;
    - what only some calls need is prepared: a constant of a function comes from its part that prepares.
    """
    functions = {f.name: f for f in module.functions}
    for function in module.functions:
        _Memory(function).check()
        _check_constants(function, functions)


@dataclass(slots=True)
class _Memory:
    """The memory of a function's values."""

    function: Function
    storage: dict[str, str] = field(default_factory=dict)
    """The value in whose memory each value is."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """The values in the memory of each."""
    elements: dict[str, int] = field(default_factory=dict)
    """The elements of each memory, for typical sizes."""
    gone: dict[str, str] = field(default_factory=dict)
    """Values that are no longer in memory, and why."""
    held: set[str] = field(default_factory=set)
    """Memory that others may read: inputs, outputs, and tensors sent to other ranks."""

    def __post_init__(self) -> None:
        for item in self.function.inputs:
            self._place(item.value, item.value.name)
            self.held.add(item.value.name)

    def _place(self, value: Value, storage: str) -> None:
        self.storage[value.name] = storage
        self.members.setdefault(storage, []).append(value.name)
        self.elements.setdefault(storage, value.tensor.typical.elements)

    def check(self) -> None:
        """Run the function."""
        function = self.function
        numbers = set(numbers_of(function))
        is_once = function.name.endswith(PREPARE)
        kept = numbers | {i.value.name for i in function.inputs if i.role != "input" and not is_once}
        for op in function.ops:
            self._use(op)
            shares = not op.callee and bool(op.operands) and _shares(op)
            for value in op.results:
                self._place(value, self.storage[op.operands[0].name] if shares else value.name)
            self._write(op, numbers)
            for number in _numbers(op, "last", len(op.operands)):
                if op.operands[number].name in kept:
                    raise VerificationError(
                        f"{op.name} frees {op.operands[number]}, which is needed later", op.location
                    )
                self.gone[op.operands[number].name] = f"its last use in {_shown(op)}"
            for number in _numbers(op, "unused", len(op.results)):
                self.gone[op.results[number].name] = f"{_shown(op)}, which says that it is unused"
        for output in function.outputs:
            if output.value.name in self.gone:
                raise VerificationError(
                    f"the output {output.name!r} is not in memory after {self.gone[output.value.name]}",
                    f"@{function.name}",
                )

    def _use(self, op: Op) -> None:
        for value in op.operands:
            if value.name in self.gone:
                raise VerificationError(
                    f"{op.name} uses {value} after {self.gone[value.name]}", op.location or f"@{self.function.name}"
                )
        if not op.callee and not _SEEN.isdisjoint(lookup(op.name, op.location).traits):
            self.held |= {self.storage[value.name] for value in op.operands}

    def _write(self, op: Op, numbers: set[str]) -> None:
        """Note that the elements of an operand are gone, if the result takes their place."""
        if (into := op.attrs.get("into")) is None:
            if not op.callee and lookup(op.name, op.location).updates:
                self._overwrite(op, self.storage[op.operands[0].name])
            return
        where = op.location or f"@{self.function.name}"
        if type(into) is not int or not 0 <= into < len(op.operands):
            raise VerificationError(f"{op.name} has no operand {into!r} to write into", where)
        operand, result = op.operands[into], op.results[0]
        storage = self.storage[operand.name]
        if lookup(op.name, op.location).kernel(Appending) is not None:
            # It only adds to the buffer of a state.
            self._place(result, result.name)
            return
        overwriting = lookup(op.name, op.location).kernel(Overwriting)
        if overwriting is None or operand.type != result.type or operand.name in numbers:
            raise VerificationError(f"{op.name} cannot write {result} into {operand}", where)
        if storage in self.held:
            raise VerificationError(f"{op.name} overwrites {operand}, which others may read", where)
        if operand.tensor.typical.elements > self.elements[storage]:
            raise VerificationError(f"{op.name} overwrites {operand}, which has the same elements several times", where)
        self._overwrite(op, storage)
        self._place(result, storage)

    def _overwrite(self, op: Op, storage: str) -> None:
        results = {value.name for value in op.results}
        for name in self.members[storage]:
            if name not in results:
                self.gone.setdefault(name, f"{_shown(op)} has overwritten it")


_SEEN = {
    *(Trait.ON_COMMUNICATOR, Trait.COMMUNICATES, Trait.TRANSFER, Trait.STARTS),
    *(Trait.MAY_SHARE, Trait.KEEPS, Trait.SHAPE),
}
"""Traits of ops whose operands may be read later through other names."""


def _shares(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    return entry.shares_storage or entry.is_identity(op.operands, op.results)


def _numbers(op: Op, key: str, count: int) -> tuple[int, ...]:
    numbers = op.attrs.get(key, ())
    if not isinstance(numbers, tuple) or any(type(n) is not int or not 0 <= n < count for n in numbers):
        raise VerificationError(f"the {key} of {op.name} are numbers of values, found {numbers!r}", op.location)
    return numbers  # type: ignore[return-value]


def _shown(op: Op) -> str:
    return f"{op.name} ({', '.join(map(str, op.results))})"


def _check_constants(function: Function, functions: Mapping[str, Function]) -> None:
    """Check that constants come from the part that prepares them, and that packed ones are used as such."""
    for op in function.ops:
        packed = {number for number, v in enumerate(op.operands) if v.tensor.form == PACKED}
        if packed and not op.callee and packed != {*_packed(op)}:
            raise VerificationError(f"{op.name} does not take these weights packed", op.location or f"@{function.name}")
    source = functions.get(function.name + PREPARE)
    if source is None:
        return
    given: dict[str, Value] = {output.value.name: output.value for output in source.outputs}
    for item in function.inputs:
        if item.role == "constant" and given.get(item.value.name) != item.value:
            raise VerificationError(f"expected {item.value} among the results of @{source.name}", f"@{function.name}")


def _packed(op: Op) -> range:
    kernel = lookup(op.name, op.location).kernel(Packed)
    return range(0) if kernel is None else range(1, len(op.operands) - kernel.others)
