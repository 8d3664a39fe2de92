"""A strategy applied to a model that it does not know: marks on the inputs and parameters of its program.

What is split is found from factor classes (`batch`, `tensor`); propagation carries it through the program. Marks that
the model has already come first: their round is an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.cost.profile import Profile
from distir_relax.errors import AnnotationError, DistIRError
from distir_relax.ir import BatchDim, Input, Instance, Module, Op, WrittenOut, whole_of
from distir_relax.layout import Cut, DeviceMesh, Placement, R, Shard, print_placements
from distir_relax.layout.partition import balanced, proportional
from distir_relax.layout.validate import fit_annotation
from distir_relax.sharding.factors import Slot, is_annotation
from distir_relax.sharding.named_annotations import Mark, mark_inputs
from distir_relax.strategies.batch_dim import Batch, find_batch
from distir_relax.strategies.expert_parallel import chosen_experts
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.tensor_parallel import tensor_classes
from distir_relax.strategies.weight_memory import Kept
from distir_relax.strategies.zero import part_of

STRATEGY_ROUND = 1
"""The round in which a strategy's marks on inputs and parameters spread: after the user's."""


@dataclass(frozen=True, slots=True)
class ApplyStrategy:
    """The pass: global stage in and out, with marks for the data and tensor axes of `strategy`.

    The batch is split over the data axis, and each parameter along the one class of the tensor axis that it has; with
    ``placements=auto`` nothing is marked but by the user.
    Parameters and inputs that the user marked stay as they are; a mark for a mesh of one axis is one for the tensor
    axis, or else the data axis, by its size. Raises `DistIRError` for a model without a batch, and for a batch with
    fewer samples than there are data-parallel ranks, or microbatches; `AnnotationError` where marks are for a mesh that
    is not the strategy's. What is sent counts with the backward's where the model `is_trained`. Where samples are is
    recorded if the strategy splits them, or if `in_part` only some of them will be taken.

    Where the devices of `profile` are unlike, all are cut as suits them (`strategies.shares`): the batch by speed,
    classes of the tensor axis by speed, but so that a device's part of the weights, times what it has `kept` of each,
    is within its memory.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy
    is_trained: bool = False
    in_part: bool = False
    profile: Profile | None = field(default=None, repr=False)
    kept: Kept = field(default=Kept(), repr=False)

    def run(self, module: Module) -> Module:
        """The module with marks, on the mesh of the strategy."""
        strategy = self.strategy
        whole, classes = whole_of(module), classes_of(module)
        needed = strategy.data * strategy.microbatches > 1 or strategy.sequence_parallel
        samples = find_batch(classes) if needed or self.in_part else None
        batch = samples if needed else None
        for count, what in ((strategy.data, "data-parallel ranks"), (strategy.microbatches, "microbatches")):
            if batch is not None and batch.size < count:
                raise DistIRError(
                    f"a batch of {batch.size} has too few samples for {count} {what}",
                    f"strategy {strategy}",
                    f"give an example of at least {count} samples",
                )
        module = _on_mesh(module, whole, classes, batch, strategy)
        dims = () if samples is None else tuple(BatchDim(name, dim, samples.size) for name, dim in samples.dims.items())
        module = replace(module, meshes=(strategy.mesh,), records=(*module.records, *dims))
        if strategy.placements == "auto":
            return module
        known = {op.operands[0].name for op in whole.function.ops if is_annotation(op)}
        experts = chosen_experts(classes, strategy)
        shares = Shares.of(self.profile, strategy)
        taken = frozenset[Slot]()
        if strategy.tensor > 1:
            taken = tensor_classes(classes, strategy.tensor, experts, self.is_trained, shares.tensor)
        split = _Split(classes, strategy, shares, batch, taken, experts, self.kept.total)
        marks = {
            item.value.name: Mark(f"strategy {strategy}", print_placements(placements), STRATEGY_ROUND)
            for item in module.main.inputs
            if item.value.name not in known and (placements := split.placements(item))
        }
        return replace(module, functions=(mark_inputs(module.main, marks), *module.functions[1:]))


@dataclass(frozen=True, slots=True)
class _Split:
    """What is split, and how: the batch, the classes that are `taken` for the tensor axis, experts by their number.

    A device has `kept` bytes for each byte of its weights.
    """

    classes: Classes
    strategy: Strategy
    shares: Shares
    batch: Batch | None
    taken: frozenset[Slot]
    experts: frozenset[Slot]
    kept: float
    most: Sequence[float] = field(init=False)
    """The largest part of what is split that each tensor rank has memory for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", self._most())

    def placements(self, item: Input) -> tuple[Placement, ...] | None:
        """How an input or a parameter lies, None where nothing is asked of it."""
        name, rank = item.value.name, len(item.value.tensor.shape)
        if item.role == "parameter":
            dim = self._dim(item)
            tensor = R if dim is None else self._shard(name, dim, self.shares.tensor, self.most)
            number = next((d for d in range(rank) if self.classes.of(name, d) in self.experts), None)
            if number is not None and self.strategy.experts == "data":
                return (self._shard(name, number, self.shares.data), tensor)
            if number is not None:
                dim, tensor = number, self._shard(name, number, self.shares.tensor, self.most)
            data = part_of(item.value.tensor, dim, self.strategy.data) if self.strategy.zero else R
            return (data, tensor)
        if self.batch is not None and name in self.batch.dims:
            dim = self.batch.dims[name]
            return (Shard(dim, shares=self.shares.data) if self.strategy.data > 1 else R, R)
        return None

    def _dim(self, item: Input) -> int | None:
        """The dim of a parameter that is split over the tensor axis."""
        name = item.value.name
        return next((d for d in range(len(item.value.tensor.shape)) if self.classes.of(name, d) in self.taken), None)

    def _shard(self, name: str, dim: int, shares: Sequence[float], most: Sequence[float] = ()) -> Shard:
        """A dim of a parameter split by shares, without sizes where devices are alike."""
        owner = self.classes.of(name, dim)
        assert owner is not None, "a dim of a class"
        size = self.classes.size(owner)
        limits = [min(size, int(size * part)) for part in most]
        even = shares or (1.0,) * len(limits)
        if not even or proportional(size, even, limits) == balanced(size, len(even)):
            return Shard(dim)
        units = Cut.of(*proportional(size, even, limits))
        return Shard(dim, self.classes.cut(name, dim, units))

    def _most(self) -> Sequence[float]:
        split = whole = 0.0
        for item in self.classes.function.inputs:
            if item.role == "parameter":
                is_split = self._dim(item) is not None
                split += item.value.tensor.bytes if is_split else 0
                whole += 0 if is_split else item.value.tensor.bytes
        places = len(self.shares.rooms)
        if not split:
            return ()
        # A place has its part of the weights.
        return [
            max(0.0, (min(room) * places / self.kept - whole) / split) for room in zip(*self.shares.rooms, strict=True)
        ]


def _on_mesh(module: Module, whole: WrittenOut, classes: Classes, batch: Batch | None, strategy: Strategy) -> Module:
    """The module with the marks that it has brought onto the mesh of the strategy."""
    if not module.meshes or module.meshes[0].shape == strategy.mesh.shape:
        return module
    given = module.meshes[0]
    axis = _axis(given, strategy)
    found: dict[tuple[str, int], str] = {}
    for function, number, op in _annotations(whole.instance, whole):
        (placement,) = fit_annotation(op.attrs["placements"], given, op.results[0].tensor.shape, op.location)
        placements: list[Placement] = [R, R]
        dim = None if batch is None or axis == 0 else _batch_dim(classes, op.results[0].name, batch)
        if dim is not None and strategy.data > 1:
            placements[0] = Shard(dim)
        placements[axis] = placement
        found.setdefault((function, number), print_placements(tuple(placements)))
    functions = tuple(
        replace(f, ops=tuple(_remarked(op, found.get((f.name, i))) for i, op in enumerate(f.ops)))
        for f in module.functions
    )
    return replace(module, functions=functions, meshes=(strategy.mesh,))


def _axis(given: DeviceMesh, strategy: Strategy) -> int:
    """The axis of the strategy's mesh that a mesh of one axis is."""
    if len(given.shape) == 1:
        for axis in (1, 0):
            if given.size == strategy.mesh.shape[axis]:
                return axis
    raise AnnotationError(
        f"the model's annotations are for {given}, which is not the mesh of the strategy {strategy}, {strategy.mesh}",
        hint="annotate for a mesh (data, tensor), or for one axis of it",
    )


def _annotations(instance: Instance, whole: WrittenOut) -> Iterator[tuple[str, int, Op]]:
    """The marks of a program: the function each is in, its number there, and the op with calls written out."""
    for number, place in enumerate(instance.ops):
        if isinstance(place, Instance):
            yield from _annotations(place, whole)
        elif is_annotation(whole.function.ops[place]):
            yield instance.function.name, number, whole.function.ops[place]


def _batch_dim(classes: Classes, name: str, batch: Batch) -> int | None:
    dims = range(len(classes.factoring.slots[name]))
    return next((dim for dim in dims if classes.of(name, dim) == batch.owner), None)


def _remarked(op: Op, placements: str | None) -> Op:
    attrs: Mapping[str, object] = op.attrs
    return op if placements is None else replace(op, attrs={**attrs, "placements": placements})  # type: ignore[dict-item]
