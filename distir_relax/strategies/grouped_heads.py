"""Attention of grouped heads: its keys and values before they are repeated for the query heads of each group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from distir_relax.cost.roofline import FLOPS_PER_BYTE, flops
from distir_relax.ir import Function, Op, Value, producers
from distir_relax.layout import is_symbolic
from distir_relax.lowering.ranked.skip_repeats import operand_before_repeat
from distir_relax.ops import PARALLEL, lookup
from distir_relax.sharding.factors import Slot, is_annotation
from distir_relax.strategies.factor_costs import Classes


@dataclass(frozen=True, slots=True)
class Repeat:
    """The repetition of keys or values, (b, heads, ...), for the query heads of each group.

    `numbers` are those of its ops in the function, by result.
    """

    before: Value
    after: Value
    ops: tuple[Op, ...]
    numbers: Mapping[str, int]


def find_repeats(function: Function) -> list[Repeat]:
    """Return the repetitions of several heads, each for several others."""
    made_by = producers(function)
    numbers = {op.results[0].name: number for number, op in enumerate(function.ops)}
    repeats = []
    for op in function.ops:
        before, counts = operand_before_repeat(op.results[0], made_by) or (None, ())
        if before is not None and len(set(counts)) == 1 and 1 < before.tensor.shape[1] < op.results[0].tensor.shape[1]:
            ops = [op]
            while ops[-1].operands[0].name != before.name:
                ops.append(made_by[ops[-1].operands[0].name])
            own = {repeating.results[0].name: numbers[repeating.results[0].name] for repeating in ops}
            repeats.append(Repeat(before, op.results[0], tuple(reversed(ops)), own))
    return repeats


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """An attention whose key/value heads are a factor class, `owner`.

    `values` are its keys and values before the `repeats`, by name, each with its dim of heads, and `ops` the numbers of
    the ops that compute them. `weights` are inputs among them, and `query_weights` others with heads, each with that
    dim.
    """

    classes: Classes
    owner: Slot
    repeats: Sequence[Repeat]
    values: Mapping[str, tuple[Value, int]]
    ops: Set[int]
    weights: Sequence[tuple[str, int]]
    query_weights: Sequence[tuple[str, int]]

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return int(self.repeats[0].after.tensor.shape[1])

    @property
    def groups(self) -> int:
        """The number of key/value heads."""
        return int(self.repeats[0].before.tensor.shape[1])

    def costs(self) -> tuple[float, float]:
        """Return the costs of a query head and of a key/value head: bytes of inputs, and the operations as bytes."""
        function = self.classes.function
        work = sum(_work(function.ops[number]) for number in self.ops)
        query_names = {name for name, _ in self.query_weights}
        query = sum(i.value.tensor.bytes for i in function.inputs if i.value.name in query_names)
        own = sum(i.value.tensor.typical.bytes for i in function.inputs if i.value.name in self.values)
        query_work = max(0.0, self.classes.work[self.owner] - work)
        return (query + query_work / FLOPS_PER_BYTE) / self.heads, (own + work / FLOPS_PER_BYTE) / self.groups


@dataclass(frozen=True, slots=True)
class AttentionFinder:
    """Finds the attentions of a program whose key/value heads can be replicated.

    `states` are the inputs that are cached, and `annotated` those that the user places, besides values of the program.
    """

    classes: Classes
    states: Set[str]
    annotated: Set[str]
    _placed: Sequence[Value] = field(init=False)
    _ops: Mapping[str, list[int]] = field(init=False)
    """The numbers of the ops that produce or use each value."""

    def __post_init__(self) -> None:
        ops: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(self.classes.function.ops):
            for name in {v.name for v in (*op.operands, *op.results)}:
                ops[name].append(number)
        object.__setattr__(self, "_ops", ops)
        function = self.classes.function
        placed = [item.value for item in function.inputs if item.value.name in self.annotated]
        object.__setattr__(self, "_placed", placed + [op.operands[0] for op in function.ops if is_annotation(op)])

    def find(self, owner: Slot, repeats: Sequence[Repeat]) -> GroupedAttention | None:
        """Return the attention that repeats keys and values, whose heads are the class `owner`.

        None if the user places a value with such heads, if an input or output of the user has key/value heads, or if an
        op does not compute each head by itself.
        """
        if len({(repeat.before.tensor.shape[1], repeat.after.tensor.shape[1]) for repeat in repeats}) > 1:
            return None
        found = self._before_repeats(owner, repeats)
        if found is None or any(self._dims(owner, value) for value in self._placed):
            return None
        values, ops = found
        weights: list[tuple[str, int]] = []
        query_weights: list[tuple[str, int]] = []
        for item in self.classes.function.inputs:
            name, dims = item.value.name, self._dims(owner, item.value)
            if name in values and item.role == "input" and name not in self.states:
                return None
            if dims and item.role != "input":
                if dims[0][1]:
                    # The rows of a head must be one block of the weight.
                    return None
                (weights if name in values else query_weights).append((name, dims[0][0]))
        outputs = (o for o in self.classes.function.outputs if o.value.name in values)
        if any(output.of not in self.states for output in outputs):
            return None
        return GroupedAttention(self.classes, owner, repeats, values, ops, weights, query_weights)

    def _before_repeats(
        self, owner: Slot, repeats: Sequence[Repeat]
    ) -> tuple[dict[str, tuple[Value, int]], set[int]] | None:
        """Return the values that keys and values are computed from, with their dim of heads, and the ops by number.

        None if they are computed with others, or not head by head.
        """
        function = self.classes.function
        repeating = {number for repeat in repeats for number in repeat.numbers.values()}
        values: dict[str, tuple[Value, int]] = {}
        ops: set[int] = set()
        pending = [repeat.before for repeat in repeats]
        while pending:
            value = pending.pop()
            if value.name in values:
                continue
            dims = self._dims(owner, value)
            if len(dims) != 1 or is_symbolic((value.tensor.shape[dims[0][0]],)):
                return None
            values[value.name] = value, dims[0][0]
            for number in self._ops[value.name]:
                if number not in ops and number not in repeating:
                    op = function.ops[number]
                    if not self._are_separate(owner, number, op):
                        return None
                    ops.add(number)
                    pending += [v for v in (*op.operands, *op.results) if self._dims(owner, v)]
        # Queries are divided by the same class: they must not be computed with keys or values before their repetition.
        return None if any(repeat.after.name in values for repeat in repeats) else (values, ops)

    def _are_separate(self, owner: Slot, number: int, op: Op) -> bool:
        """Whether an op computes the results of each head from operands of this head."""
        factoring = self.classes.factoring
        values = (*op.operands, *op.results)
        for atom in factoring.atoms[number]:
            member = next(((v, place) for v, place in zip(values, atom.places, strict=True) if place is not None), None)
            is_of_heads = member and factoring.classes[member[0].name, *member[1]] == owner
            if is_of_heads and atom.kind != PARALLEL:
                return False
        has_heads = [[bool(self._dims(owner, v)) for v in group] for group in (op.operands, op.results)]
        return any(has_heads[0]) and all(has_heads[1]) and not lookup(op.name, op.location).updates

    def _dims(self, owner: Slot, value: Value) -> list[tuple[int, int]]:
        """Return the dims of a value with heads, and the slot of the heads in each."""
        factoring = self.classes.factoring
        return [
            (dim, index)
            for dim, sizes in enumerate(factoring.slots[value.name])
            for index in range(len(sizes))
            if factoring.classes[value.name, dim, index] == owner
        ]


def _work(op: Op) -> float:
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return flops(lookup(op.name, op.location), operands, op.attrs, results)
