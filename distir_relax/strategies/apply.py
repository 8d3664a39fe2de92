"""Apply a strategy to a model: annotate the inputs and parameters of its program.

The split dims are chosen from factor classes (`batch_dim`, `tensor_parallel`); propagation carries them through the
program. The model's own annotations take precedence: they belong to an earlier round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.cost.profile import Profile
from distir_relax.errors import AnnotationError, DistIRError
from distir_relax.ir import (
    PLACEMENTS,
    BatchDim,
    CachedState,
    HeadPartition,
    InlinedFunction,
    Input,
    Instance,
    Module,
    Op,
    inlined_main,
)
from distir_relax.layout import Cut, DeviceMesh, Placement, R, Shard, is_always
from distir_relax.layout.partition import balanced, proportional
from distir_relax.layout.validate import validate_annotation
from distir_relax.sharding.factors import Slot, is_annotation
from distir_relax.sharding.named_annotations import Mark, mark_inputs
from distir_relax.strategies.balanced_rows import balanced_cut
from distir_relax.strategies.batch_dim import Batch, find_batch, find_sequence
from distir_relax.strategies.expert_parallel import chosen_experts
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.split_states import state_marks
from distir_relax.strategies.strategy import OPTIONS, Strategy
from distir_relax.strategies.tensor_parallel import tensor_classes
from distir_relax.strategies.weight_memory import WeightMemory

STRATEGY_ROUND = 1
"""The propagation round of a strategy's annotations on inputs and parameters: after the user's."""


@dataclass(frozen=True, slots=True)
class ApplyStrategy:
    """Pass within the global stage: annotations for the data and tensor axes of `strategy`.

    The batch is split over the data axis, and each parameter along its one class of the tensor axis; with
    ``placements=auto`` only the user's annotations remain. Parameters and inputs that the user annotated are not
    changed; an annotation for a mesh of one axis is for the tensor axis, or else the data axis, by its size. Raises
    `DistIRError` for a model without a batch, and for a batch with fewer samples than there are data-parallel ranks, or
    microbatches; `AnnotationError` if annotations are for another mesh than the strategy's. Traffic includes that of
    the backward if the model `is_trained`. The dims of samples are recorded if the strategy splits them, or if
    `in_part` only some of them will be used.

    On heterogeneous devices of `profile`, the batch is split by speed (`strategies.heterogeneous`), and so are classes
    of the tensor axis, but limited so that a device's part of the weights, with its `weight_memory`, is within its
    memory.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy
    is_trained: bool = False
    in_part: bool = False
    profile: Profile | None = field(default=None, repr=False)
    weight_memory: WeightMemory = field(default=WeightMemory(), repr=False)

    def run(self, module: Module) -> Module:
        """Return the module with annotations, on the mesh of the strategy."""
        strategy = self.strategy
        inlined, classes = inlined_main(module), classes_of(module)
        needs_batch = strategy.data * strategy.microbatches > 1 or _options_need_batch(strategy)
        samples = find_batch(classes) if needs_batch or self.in_part else None
        batch = samples if needs_batch else None
        for count, noun in ((strategy.data, "data-parallel ranks"), (strategy.microbatches, "microbatches")):
            if batch is not None and is_always(batch.size, "<", count):
                raise DistIRError(
                    f"a batch of {batch.size} has too few samples for {count} {noun}",
                    f"strategy {strategy}",
                    f"give an example of at least {count} samples",
                )
        module = _remesh(module, inlined, classes, batch, strategy)
        dims = () if samples is None else tuple(BatchDim(name, dim, samples.size) for name, dim in samples.dims.items())
        module = replace(module, meshes=(strategy.mesh,), records=(*module.records, *dims))
        if strategy.placements == "auto":
            return module
        own = {op.operands[0].name for op in inlined.function.ops if is_annotation(op)}
        # A state has the layout of the values that are appended to it, but for the dim that grows.
        annotated = own | {record.input for record in module.records if isinstance(record, CachedState)}
        experts = chosen_experts(classes, strategy)
        shares = Shares.of(self.profile, strategy)
        tensor_owners, divided = frozenset[Slot](), _divided_heads(module, classes)
        if strategy.tensor > 1:
            tensor_owners = tensor_classes(
                classes, strategy.tensor, experts, self.is_trained, shares.along("tensor"), divided.keys()
            )
        is_split = strategy.context > 1 and strategy.rows == "split"
        sequence = find_sequence(classes, samples, strategy.context) if is_split else None
        parts = shares.along("context") or (1.0,) * strategy.context
        rows = None if sequence is None else balanced_cut(classes, sequence, parts)
        split = _Split(
            classes, strategy, shares, batch, sequence, rows, tensor_owners, divided, experts, self.weight_memory.total
        )
        annotations = {
            item.value.name: Mark(f"strategy {strategy}", placements, STRATEGY_ROUND)
            for item in module.main.inputs
            if item.value.name not in annotated and (placements := split.placements(item))
        }
        if strategy.context > 1:
            marks = state_marks(module, strategy, parts, STRATEGY_ROUND)
            if not is_split and not marks:
                raise DistIRError(
                    "expected growing states of a bounded length to split, found none",
                    f"strategy {strategy}",
                    "compile with dr.compile_generation and max_length, or without rows=whole",
                )
            annotations |= {name: mark for name, mark in marks.items() if name not in own}
        return replace(module, functions=(mark_inputs(module.main, annotations), *module.functions[1:]))


@dataclass(frozen=True, slots=True)
class _Split:
    """Chosen splits: batch, sequence, the class `owners` on the tensor axis, and the classes that number experts.

    The rows of the sequence are cut, if not consecutive.

    `divided` are the numbers of units of classes that `ReplicateHeads` has divided. A device needs `bytes_per_weight`
    bytes for each byte of its weights.
    """

    classes: Classes
    strategy: Strategy
    shares: Shares
    batch: Batch | None
    sequence: Batch | None
    rows: Cut | None
    owners: frozenset[Slot]
    divided: Mapping[Slot, tuple[int, ...]]
    experts: frozenset[Slot]
    bytes_per_weight: float
    limits: Sequence[float] = field(init=False)
    """The largest fraction of the split weights that fits in the memory of each tensor rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", self._memory_limits())

    def placements(self, item: Input) -> tuple[Placement, ...] | None:
        """Return the layout of an input or a parameter, None if it is not annotated."""
        name, rank = item.value.name, len(item.value.tensor.shape)
        if item.role == "parameter":
            dim = self._dim(item)
            tensor = R if dim is None else self._shard(name, dim, self.shares.along("tensor"), self.limits)
            expert_dim = next((d for d in range(rank) if self.classes.of(name, d) in self.experts), None)
            if expert_dim is not None and self.strategy.experts == "data":
                return self.strategy.layout(self._shard(name, expert_dim, self.shares.along("data")), tensor)
            if expert_dim is not None:
                dim, tensor = expert_dim, self._shard(name, expert_dim, self.shares.along("tensor"), self.limits)
            return self.strategy.layout(tensor=tensor)
        found: dict[str, Placement] = {}
        if self.batch is not None and name in self.batch.dims:
            is_split = self.strategy.data > 1
            found["data"] = Shard(self.batch.dims[name], shares=self.shares.along("data")) if is_split else R
        if self.sequence is not None and name in self.sequence.dims:
            dim, cut = self.sequence.dims[name], self.rows
            shares = self.shares.along("context")
            found["context"] = (
                Shard(dim, shares=shares) if cut is None else Shard(dim, self.classes.cut(name, dim, cut))
            )
        return self.strategy.layout(**found) if found else None

    def _dim(self, i: Input) -> int | None:
        """Return the dim of a parameter that is split over the tensor axis."""
        name = i.value.name
        return next((d for d in range(len(i.value.tensor.shape)) if self.classes.of(name, d) in self.owners), None)

    def _shard(self, name: str, dim: int, shares: Sequence[float], limits: Sequence[float] = ()) -> Shard:
        """Return a split of a parameter's dim by shares, without sizes if they are equal."""
        owner = self.classes.of(name, dim)
        assert owner is not None, "a dim of a class"
        if owner in self.divided:
            return Shard(dim, self.classes.cut(name, dim, Cut.of(*self.divided[owner])))
        size = self.classes.size(owner)
        max_sizes = [min(size, int(size * fraction)) for fraction in limits]
        weights = shares or (1.0,) * len(max_sizes)
        if not weights or proportional(size, weights, max_sizes) == balanced(size, len(weights)):
            return Shard(dim)
        units = Cut.of(*proportional(size, weights, max_sizes))
        return Shard(dim, self.classes.cut(name, dim, units))

    def _memory_limits(self) -> Sequence[float]:
        split = fixed = 0.0
        for item in self.classes.function.inputs:
            if item.role == "parameter":
                is_split = self._dim(item) is not None
                split += item.value.tensor.bytes if is_split else 0
                fixed += 0 if is_split else item.value.tensor.bytes
        stages = len(self.shares.memory)
        if not split:
            return ()
        # A stage has its part of the weights.
        return [
            max(0.0, (min(m) * stages / self.bytes_per_weight - fixed) / split)
            for m in zip(*self.shares.memory, strict=True)
        ]


def _divided_heads(module: Module, classes: Classes) -> dict[Slot, tuple[int, ...]]:
    """Return the numbers of heads of the tensor ranks by class, as `ReplicateHeads` has divided them."""
    records = [record for record in module.records if isinstance(record, HeadPartition)]
    owners = [classes.of(record.value, record.dim) for record in records]
    return {owner: record.parts for owner, record in zip(owners, records, strict=True) if owner is not None}


def _options_need_batch(strategy: Strategy) -> bool:
    return any(option.needs_batch(strategy[name]) for name, option in OPTIONS.items())


def _remesh(
    module: Module, inlined: InlinedFunction, classes: Classes, batch: Batch | None, strategy: Strategy
) -> Module:
    """Return the module with its own annotations converted to the mesh of the strategy."""
    if not module.meshes or module.meshes[0].shape == strategy.mesh.shape:
        return module
    mesh = module.meshes[0]
    axis = _axis(mesh, strategy)
    converted: dict[tuple[str, int], tuple[Placement, ...]] = {}
    for function, number, op in _annotations(inlined.instance, inlined):
        (placement,) = validate_annotation(op.attrs["placements"], mesh, op.results[0].tensor.shape, op.location)
        placements = list(strategy.layout())
        dim = None if batch is None or axis == 0 else _batch_dim(classes, op.results[0].name, batch)
        if dim is not None and strategy.data > 1:
            placements[0] = Shard(dim)
        placements[axis] = placement
        converted.setdefault((function, number), tuple(placements))
    functions = tuple(
        replace(f, ops=tuple(_with_placements(op, converted.get((f.name, i))) for i, op in enumerate(f.ops)))
        for f in module.functions
    )
    return replace(module, functions=functions, meshes=(strategy.mesh,))


def _axis(mesh: DeviceMesh, strategy: Strategy) -> int:
    """Return the axis of the strategy's mesh that corresponds to a mesh of one axis."""
    if len(mesh.shape) == 1:
        for axis in (1, 0):
            if mesh.size == strategy.mesh.shape[axis]:
                return axis
    raise AnnotationError(
        f"the model's annotations are for {mesh}, which is not the mesh of the strategy {strategy}, {strategy.mesh}",
        hint="annotate for a mesh (data, tensor), or for one axis of it",
    )


def _annotations(instance: Instance, inlined: InlinedFunction) -> Iterator[tuple[str, int, Op]]:
    """Yield the annotations of a program: the function of each, its number there, and the inlined op."""
    for number, target in enumerate(instance.ops):
        if isinstance(target, Instance):
            yield from _annotations(target, inlined)
        elif is_annotation(inlined.function.ops[target]):
            yield instance.function.name, number, inlined.function.ops[target]


def _batch_dim(classes: Classes, name: str, batch: Batch) -> int | None:
    dims = range(len(classes.factoring.slots[name]))
    return next((dim for dim in dims if classes.of(name, dim) == batch.owner), None)


def _with_placements(op: Op, placements: tuple[Placement, ...] | None) -> Op:
    return op if placements is None else replace(op, attrs={**op.attrs, PLACEMENTS: placements})
