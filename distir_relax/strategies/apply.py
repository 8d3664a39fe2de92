"""A strategy applied to a model that it does not know: marks on the inputs and parameters of its program.

What is split is found from factor classes (`batch`, `tensor`); propagation carries it through the program. Marks that
the model has already come first: their round is an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import AnnotationError, DistIRError
from distir_relax.ir import BatchDim, Input, Instance, Module, Op, WrittenOut, written_out
from distir_relax.layout import DeviceMesh, Placement, R, Shard, print_placements
from distir_relax.layout.fit import fit_annotation
from distir_relax.sharding.apply import Mark, mark_inputs
from distir_relax.sharding.factors import Slot, is_annotation
from distir_relax.strategies.batch import Batch, find_batch
from distir_relax.strategies.classes import Classes, classes_of
from distir_relax.strategies.experts import chosen_experts
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.tensor import tensor_classes
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
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy
    is_trained: bool = False
    in_part: bool = False

    def run(self, module: Module) -> Module:
        """The module with marks, on the mesh of the strategy."""
        strategy = self.strategy
        whole = written_out(module, module.main)
        classes = classes_of(whole.function)
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
        tensor = strategy.tensor
        taken = tensor_classes(classes, tensor, experts, self.is_trained) if tensor > 1 else frozenset[Slot]()
        marks = {
            item.value.name: Mark(f"strategy {strategy}", print_placements(placements), STRATEGY_ROUND)
            for item in module.main.inputs
            if item.value.name not in known
            and (placements := _placements(item, classes, batch, taken, experts, strategy))
        }
        return replace(module, functions=(mark_inputs(module.main, marks), *module.functions[1:]))


def _placements(
    item: Input,
    classes: Classes,
    batch: Batch | None,
    taken: frozenset[Slot],
    experts: frozenset[Slot],
    strategy: Strategy,
) -> tuple[Placement, ...] | None:
    """How an input or a parameter lies, None where nothing is asked of it."""
    name, rank = item.value.name, len(item.value.tensor.shape)
    if item.role == "parameter":
        mine = (dim for dim in range(rank) if classes.of(name, dim) in taken)
        dim = next(mine, None)
        tensor = R if dim is None else Shard(dim)
        number = next((d for d in range(rank) if classes.of(name, d) in experts), None)
        if number is not None and strategy.experts == "data":
            return (Shard(number), tensor)
        if number is not None:
            dim, tensor = number, Shard(number)
        data = part_of(item.value.tensor, dim, strategy.data) if strategy.zero else R
        return (data, tensor)
    if batch is not None and name in batch.dims:
        return (Shard(batch.dims[name]) if strategy.data > 1 else R, R)
    return None


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
