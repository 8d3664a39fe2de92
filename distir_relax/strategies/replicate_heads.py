"""Replicate key/value heads, so that query heads can be divided independently of their groups.

Heads of grouped-query attention are divided by group: of 9 query heads over 3 key/value heads, 2 ranks get 6 and 3, and
2 key/value heads leave two of 4 ranks idle. This pass divides the query heads as balances best, and gives each rank a
copy of every key/value head that its query heads read, with its projections and its cache::

    query heads        0 1 2 3 4 | 5 6 7 8
    key/value heads    0     1   | 1 2            copies 0 1 1 2 of 3 heads

The program then has a dim of copies where it had one of key/value heads. Copies are not stored: each rank reads the
rows of its heads from the model's weights (`lowering.emit.bundle`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import Attribute, CachedState, Function, HeadPartition, Module, Op, TensorType, Value
from distir_relax.ops import lookup
from distir_relax.sharding.factors import Slot, factoring_of
from distir_relax.strategies.factor_costs import classes_of
from distir_relax.strategies.grouped_heads import AttentionFinder, GroupedAttention, Repeat, find_repeats
from distir_relax.strategies.head_division import HeadDivision, divide_heads
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.tensor_parallel import tensor_classes


@dataclass(frozen=True, slots=True)
class ReplicateHeads:
    """Pass within the global stage: replicate key/value heads on the tensor ranks whose query heads read them.

    Each attention is changed if its slowest rank becomes faster, by the bytes that ranks read and their operations. One
    whose heads the user places is not: by annotations of the program, or of the inputs and parameters `annotated`.
    Inputs of the user keep their shapes; cached keys and values have more heads.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy
    annotated: tuple[str, ...] = ()

    def run(self, module: Module) -> Module:
        """Return the module with copies of heads, and a `HeadPartition` for each weight whose heads are divided so."""
        ranks = self.strategy.tensor
        # ZeRO slices the same weights along the data axis: a slice of copies is no interval of the stored weight.
        is_possible = self.strategy.placements != "auto" and not self.strategy["zero"] and len(module.functions) == 1
        if ranks == 1 or not is_possible:
            return module
        repeats = find_repeats(module.main)
        if not repeats:
            return module
        classes = classes_of(module)
        by_class: dict[Slot, list[Repeat]] = defaultdict(list)
        for repeat in repeats:
            if len(classes.factoring.slots[repeat.before.name][1]) == 1:
                by_class[classes.factoring.classes[repeat.before.name, 1, 0]].append(repeat)
        states = frozenset(record.input for record in module.records if isinstance(record, CachedState))
        divided: dict[Slot, tuple[GroupedAttention, HeadDivision]] = {}
        parts: dict[Slot, float] = {}
        finder = AttentionFinder(classes, states, frozenset(self.annotated))
        for owner, members in by_class.items():
            attention = finder.find(owner, members)
            if attention is not None:
                query_cost, group_cost = attention.costs()
                division = divide_heads(attention.heads, attention.groups, ranks, query_cost, group_cost)
                total = query_cost * attention.heads + group_cost * attention.groups
                if len(division.copies) > attention.groups:
                    divided[owner] = attention, division
                    parts[owner] = division.slowest(query_cost, group_cost) / total
        chosen = tensor_classes(classes, ranks, parts=parts)
        rewriter = _Rewriter(module.main)
        for owner, (attention, division) in divided.items():
            if owner in chosen:
                rewriter.replicate(attention, division)
        if not rewriter.records:
            return module
        changed = replace(module, functions=(rewriter.function(),), records=(*module.records, *rewriter.records))
        # An op may divide the heads of some size only, such as a product by weights that are quantized in groups.
        return changed if _are_divisible(changed, rewriter.records) else module


def _are_divisible(module: Module, records: Sequence[HeadPartition]) -> bool:
    """Return whether all ops can divide the heads so: they are units of a factor class."""
    factoring = factoring_of(module)
    slots = [(record.value, record.dim, 0) for record in records]
    sizes = [factoring.size(slot) for slot in slots]
    return sizes == [sum(record.parts) for record in records] and not any(map(factoring.is_blocked, slots))


@dataclass(slots=True)
class _Rewriter:
    """Rewrites a function: `types` are new types of values, `ops` have the new ops in place of some, by number."""

    main: Function
    types: dict[str, TensorType] = field(default_factory=dict)
    ops: dict[int, tuple[Op, ...]] = field(default_factory=dict)
    records: list[HeadPartition] = field(default_factory=list)

    def replicate(self, attention: GroupedAttention, division: HeadDivision) -> None:
        """Replicate the key/value heads of an attention, as the division of its query heads needs."""
        groups, copies, queries = attention.groups, division.copies, division.queries
        for value, dim in attention.values.values():
            self.types[value.name] = _with_heads(value.tensor, dim, groups, len(copies))
        for number in attention.ops:
            self.ops[number] = (self._localized(self.main.ops[number]),)
        for repeat in attention.repeats:
            self._repeat(repeat, queries)
        parts = tuple(map(len, division.read))
        self.records += [HeadPartition(name, dim, parts, copies, groups) for name, dim in attention.weights]
        if len(set(queries)) > 1:
            self.records += [HeadPartition(name, dim, division.sizes) for name, dim in attention.query_weights]

    def function(self) -> Function:
        """Return the rewritten function."""
        inputs = tuple(replace(item, value=self._value(item.value)) for item in self.main.inputs)
        outputs = tuple(replace(o, value=self._value(o.value)) for o in self.main.outputs)
        ops = [
            replace(op, operands=tuple(map(self._value, op.operands)), results=tuple(map(self._value, op.results)))
            for number, old in enumerate(self.main.ops)
            for op in self.ops.get(number, (old,))
        ]
        return replace(self.main, inputs=inputs, ops=tuple(ops), outputs=outputs)

    def _value(self, value: Value) -> Value:
        return replace(value, type=self.types[value.name]) if value.name in self.types else value

    def _localized(self, op: Op) -> Op:
        """Return an op on its heads with the attributes of another number of them, as of a shard."""
        operands, results = ([self._value(v).tensor for v in values] for values in (op.operands, op.results))
        entry = lookup(op.name, op.location)
        attrs = op.attrs if entry.split.localize is None else entry.split.localize(op.attrs, operands, results)
        assert list(entry.semantics.infer(operands, attrs)) == results, f"{op.name} computes each head by itself"
        return replace(op, attrs=attrs)

    def _repeat(self, repeat: Repeat, queries: Sequence[int]) -> None:
        """Repeat copy `i` of a key/value head for `queries[i]` query heads."""
        alone, spread, last = repeat.ops
        if len(set(queries)) > 1:
            before = self._value(repeat.before)
            attrs: dict[str, Attribute] = {"axis": 1, "repeats": tuple(queries)}
            self.ops |= dict.fromkeys(repeat.numbers.values(), ())
            self.ops[repeat.numbers[last.results[0].name]] = (
                Op("repeat_elements", (before,), last.results, attrs, last.location),
            )
            return
        shape = self.types[repeat.before.name].shape
        for op, times in ((alone, 1), (spread, queries[0])):
            spread_shape = (*shape[:2], times, *shape[2:])
            self.types[op.results[0].name] = replace(op.results[0].tensor, shape=spread_shape)
            self.ops[repeat.numbers[op.results[0].name]] = (replace(op, attrs={"shape": spread_shape}),)


def _with_heads(tensor: TensorType, dim: int, before: int, after: int) -> TensorType:
    shape = list(tensor.shape)
    shape[dim] = shape[dim] // before * after
    return replace(tensor, shape=tuple(shape))
