"""Overlap of collectives with computation: each starts where its operand exists, and is awaited before its first use.

Small tensors that one call produces, such as the gradients of a block, are reduced together, in a bucket::

    %g, %b, %x.grad = call @backward(...)         %g, %b, %x.grad = call @backward(...)
    %w = all_reduce(%g)                           %flat = concat(%g, %b)
    %v = all_reduce(%b)                      =>   %sum = all_reduce(%flat) {stream="collectives"}
    %y.grad = call @backward(%x.grad)             %y.grad = call @backward(%x.grad)
    %w.new = update(%w)                           %sum.ready = wait(%sum)
    %v.new = update(%v)                           %w, %v = the parts of %sum.ready
                                                  %w.new = update(%w)
                                                  %v.new = update(%v)

All devices start them in the order of the program, so they match. Updates of weights are done in the order in which
their gradients are complete. A collective with little to compute before its first use stays where it is, and so do
those between the tasks of a pipeline, and reduce-scatters of single microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import WAIT, Function, MicrobatchParts, Module, Op, Value, fresh_name, value_names
from distir_relax.layout import Collective
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.spmd_inference import infer_placed

STREAM = "collectives"
"""The stream of the collectives that this pass starts: a rank executes them one after the other."""
BUCKET = 4 << 20
"""Bytes of a bucket by default."""
_LEAST_IN_BUCKET = 16
"""Tensors that a bucket has room for, at least: for larger ones the copy takes longer than a message of their own."""
_LEAST_WORK = 1 << 20
"""Bytes of results to compute between start and first use, from which starting a collective takes less time."""


@dataclass(frozen=True, slots=True)
class OverlapCollectives:
    """Pass: distributed stage in and out. Put collectives on a stream, small all-reduces in buckets of `bucket` bytes.

    Tensors above a sixteenth of that are reduced on their own, without a copy.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    bucket: int = BUCKET

    def run(self, module: Module) -> Module:
        """Overlap collectives of every function."""
        updating = _updating_functions(module)
        has_parts = any(isinstance(record, MicrobatchParts) for record in module.records)
        functions = (
            _Overlap(function, updating, self.bucket, has_parts and function is module.main).function()
            for function in module.functions
        )
        return replace(module, functions=tuple(functions))


def _updating_functions(module: Module) -> frozenset[str]:
    """Return the functions that update some operand in place, or call one that does."""
    updating = {f.name for f in module.functions if any(_is_update(op) for op in f.ops)}
    while True:
        callers = {f.name for f in module.functions if any(op.callee in updating for op in f.ops)} - updating
        if not callers:
            return frozenset(updating)
        updating |= callers


def _is_update(op: Op) -> bool:
    return not op.callee and lookup(op.name, op.location).updates


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Collectives that are executed as one, or one alone, by their numbers in the function; it starts at op `start`."""

    members: tuple[int, ...]
    start: int


@dataclass(slots=True)
class _Overlap:
    original: Function
    updating: frozenset[str]
    bucket: int
    has_parts: bool
    """Whether the function repeats its ops for each microbatch."""
    ops: list[Op] = field(default_factory=list)
    names: set[str] = field(init=False)
    storage: dict[str, str] = field(init=False)
    """The value whose storage each view is in."""
    waits: dict[int, list[Op]] = field(default_factory=dict)
    """The ops that wait for the bucket that starts at an op, and give the results of its members."""

    def __post_init__(self) -> None:
        self.names = value_names(self.original)
        self.storage = {}
        for op in self.original.ops:
            if not op.callee and op.operands and lookup(op.name, op.location).shares_storage:
                source = op.operands[0].name
                self.storage.update((v.name, self.storage.get(source, source)) for v in op.results)

    def function(self) -> Function:
        """Return the function with its collectives overlapped."""
        # A pipeline's schedule decides where its sums and updates are.
        is_scheduled = any(op.task for op in self.original.ops)
        buckets = [] if is_scheduled else sorted(self._buckets(), key=lambda b: b.start)
        if not buckets:
            return self.original
        ops = self._with_updates_in_order(buckets)
        deadlines = self._deadlines(ops)
        starts: dict[int, _Bucket] = {}
        awaited: defaultdict[int, list[int]] = defaultdict(list)
        members: set[int] = set()
        for bucket in buckets:
            deadline = min(deadlines[member] for member in bucket.members)
            if _has_work(ops[bucket.start + 1 : deadline]):
                starts[bucket.start] = bucket
                awaited[deadline].append(bucket.start)
                members.update(bucket.members)
        for number, op in enumerate(ops):
            self._wait(awaited.get(number, ()))
            if number in starts:
                self._start(starts[number])
            if number not in members:
                self.ops.append(op)
        self._wait(awaited.get(len(ops), ()))
        return replace(self.original, ops=tuple(self.ops))

    def _buckets(self) -> Iterator[_Bucket]:
        """Iterate over the collectives of the function, small ones that belong together in buckets.

        Those of one call's results start at the first of them. In a function without calls a bucket starts at its last.
        """
        ops = self.original.ops
        producer = {v.name: number for number, op in enumerate(ops) for v in op.results}
        has_calls = any(op.callee for op in ops)
        deadlines = {} if has_calls else self._deadlines(ops)
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, op in enumerate(ops):
            # Parts of gradients that each microbatch scatters are added before the next one.
            if not _can_start(op) or (self.has_parts and not _is_all_reduce(op)):
                continue
            source = producer.get(op.operands[0].name)
            is_of_call = source is not None and bool(ops[source].callee)
            if not self._is_small(op) or is_of_call != has_calls:
                yield _Bucket((number,), number)
                continue
            attrs = tuple(sorted((key, str(value)) for key, value in op.attrs.items()))
            kind = op.operands[0].placed
            key = (op.name, attrs, kind.dtype, kind.devices, source if has_calls else None)
            group = groups.setdefault(key, [])
            size = sum(_bytes(ops[member].operands[0]) for member in (*group, number))
            if size > self.bucket or any(deadlines.get(member, number + 1) <= number for member in group):
                yield _Bucket(tuple(group), group[0 if has_calls else -1])
                group = groups[key] = []
            group.append(number)
        for group in groups.values():
            yield _Bucket(tuple(group), group[0 if has_calls else -1])

    def _is_small(self, op: Op) -> bool:
        """Whether an op is an all-reduce of a small tensor, of the same shape on all devices."""
        shape = op.operands[0].placed.shape
        return (
            _is_all_reduce(op)
            and all(isinstance(size, int) for size in shape)
            and _bytes(op.operands[0]) * _LEAST_IN_BUCKET <= self.bucket
        )

    def _with_updates_in_order(self, buckets: Sequence[_Bucket]) -> list[Op]:
        """Return the ops; those after the last call and communication in the order in which buckets are complete.

        An update of a weight then need not wait for the gradients of other weights. Ops on the storage of a value that
        is updated keep their order.
        """
        ops = list(self.original.ops)
        order: dict[str, int] = {}
        """The last bucket, by number, that a value depends on."""
        for number, bucket in enumerate(buckets):
            order.update((ops[member].results[0].name, number) for member in bucket.members)
        first = 1 + max(i for i, op in enumerate(ops) if op.callee or Trait.COMMUNICATES in lookup(op.name).traits)
        used: defaultdict[str, int] = defaultdict(lambda: -1)
        updated: defaultdict[str, int] = defaultdict(lambda: -1)
        keys = []
        for op in ops[first:]:
            roots = [self.storage.get(v.name, v.name) for v in op.operands]
            key = max([order.get(v.name, -1) for v in op.operands] + [updated[root] for root in roots], default=-1)
            if _is_update(op):
                key = updated[roots[0]] = max(key, used[roots[0]])
            used.update((root, max(used[root], key)) for root in roots)
            order.update((v.name, key) for v in op.results)
            keys.append(key)
        in_order = sorted(range(len(keys)), key=keys.__getitem__)
        return [*ops[:first], *(ops[first + number] for number in in_order)]

    def _deadlines(self, ops: Sequence[Op]) -> dict[int, int]:
        """Return for each collective that may start the first op before which it must be complete.

        That op uses the result, or updates the operand.
        """
        first_use: dict[str, int] = {}
        updates: defaultdict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(ops):
            for value in op.operands:
                first_use.setdefault(value.name, number)
            updated = op.operands if op.callee in self.updating else op.operands[:1] if _is_update(op) else ()
            for value in updated:
                updates[self.storage.get(value.name, value.name)].append(number)
        deadlines = {}
        for number, op in enumerate(ops):
            if _can_start(op):
                source = self.storage.get(op.operands[0].name, op.operands[0].name)
                later = (update for update in updates.get(source, ()) if update > number)
                deadlines[number] = min(first_use.get(op.results[0].name, len(ops)), next(later, len(ops)))
        return deadlines

    def _start(self, bucket: _Bucket) -> None:
        """Add the ops that start a bucket."""
        members = [self.original.ops[number] for number in bucket.members]
        first = members[0]
        results = [op.results[0] for op in members]
        attrs = {**first.attrs, "stream": STREAM}
        if len(members) == 1:
            started = replace(results[0], name=self._fresh(f"{results[0].name}.started"))
            self.ops.append(replace(first, results=(started,), attrs=attrs))
            self.waits[bucket.start] = [Op(WAIT, (started,), (results[0],), {}, first.location)]
            return
        flat = [self._add("reshape", (op.operands[0],), shape=(_elements(op.operands[0]),)) for op in members]
        operand = self._add("concat", tuple(flat), axis=0)
        started = replace(operand, name=self._fresh("bucket.started"))
        ready = replace(operand, name=self._fresh("bucket.ready"))
        self.ops.append(replace(first, operands=(operand,), results=(started,), attrs=attrs))
        wait = Op(WAIT, (started,), (ready,), {}, first.location)
        self.waits[bucket.start] = [wait, *self._parts(ready, results)]

    def _parts(self, ready: Value, results: Sequence[Value]) -> Iterator[Op]:
        """Iterate over the ops that take the results of a bucket's members from that of the bucket."""
        begin = 0
        for result in results:
            end = begin + _elements(result)
            attrs = {"axes": (0,), "begin": (begin,), "end": (end,), "strides": (1,)}
            part = Value(self._fresh(f"{result.name}.flat"), replace(ready.placed, shape=(end - begin,)))
            yield Op("strided_slice", (ready,), (part,), attrs)
            yield Op("reshape", (part,), (result,), {"shape": result.placed.shape})
            begin = end

    def _wait(self, starts: Sequence[int]) -> None:
        """Wait for the buckets that start at these ops."""
        for start in starts:
            self.ops += self.waits[start]

    def _add(self, name: str, operands: tuple[Value, ...], **attrs: int | tuple[int, ...]) -> Value:
        """Add an op of a bucket, and return its result."""
        kinds = [v.placed for v in operands]
        (kind,) = infer_placed(name, kinds, attrs, kinds[0].devices)
        result = Value(self._fresh("bucket"), kind)
        self.ops.append(Op(name, operands, (result,), attrs))
        return result

    def _fresh(self, name: str) -> str:
        return fresh_name(name, self.names)


def _can_start(op: Op) -> bool:
    return not op.callee and "stream" not in op.attrs and bool(lookup(op.name, op.location).semantics.started)


def _is_all_reduce(op: Op) -> bool:
    return lookup(op.name, op.location).cost.collective is Collective.ALL_REDUCE


def _has_work(ops: Sequence[Op]) -> bool:
    """Whether there is enough to compute in these ops."""
    work = 0
    for op in ops:
        if op.callee:
            return True
        if lookup(op.name, op.location).traits.isdisjoint({Trait.COMMUNICATES, Trait.VIEW}):
            work += sum(map(_bytes, op.results))
    return work >= _LEAST_WORK


def _bytes(value: Value) -> int:
    """Return the bytes of a value on its first device, typically if they are symbolic."""
    return value.placed.local(0).typical.bytes


def _elements(value: Value) -> int:
    return value.placed.local(0).elements
