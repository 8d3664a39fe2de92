"""Tensor parallelism by factor classes: choose the weight dims to split between devices.

Column and row pairs, heads, vocabularies and experts are one class each, shared by the products on both sides: the
first computes its part of the class, the second sums over it (Shoeybi et al., Megatron-LM, 2019). The class that all
layers share, the width of the residual stream, would divide as much work, but send the results of every product. In a
chain of products each class is a rival of the next; the optimum is every second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from distir_relax.cost.roofline import FLOPS_PER_BYTE
from distir_relax.layout.partition import proportional
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes
from distir_relax.strategies.max_weight_independent_set import find_independent_set

_TRAINING_WORK = 3.0
"""Work of a training step in forwards: a product has two in its backward."""


def tensor_classes(
    classes: Classes,
    ranks: int,
    without: Set[Slot] = frozenset(),
    is_trained: bool = False,
    shares: Sequence[float] = (),
    divided: Set[Slot] = frozenset(),
    parts: Mapping[Slot, float] = MappingProxyType({}),
) -> frozenset[Slot]:
    """Return the classes to split between `ranks` devices, at most one per product.

    They maximize the total saving, each weighted by the fraction of its time in which devices compute and do not send.
    Classes that send more bytes than they save, and those of `without`, are excluded. If the model `is_trained`, the
    backward counts too. Devices get `shares` of the work, equal ones unless given.
    """
    gains: dict[Slot, float] = {}
    for owner in classes.weights:
        part = parts.get(owner) or _slowest_part(classes, owner, shares or (1.0,) * ranks)
        saved, sent = _saved(classes, owner, part, is_trained), classes.sent[owner]
        if is_trained:
            sent += classes.gradient_sent[owner]
        if owner not in without and saved > sent and _is_splittable(classes, owner):
            gains[owner] = saved * saved / (saved + FLOPS_PER_BYTE * sent)
    return frozenset(find_independent_set(gains, classes.rivals)).union(divided)


def _is_splittable(classes: Classes, owner: Slot) -> bool:
    return classes.work[owner] > 0 and not classes.is_whole(owner)


def _slowest_part(classes: Classes, owner: Slot, shares: Sequence[float]) -> float:
    """Return the fraction of a class on the slowest device, as if all had the same speed."""
    size = classes.size(owner)
    sizes = proportional(size, shares)
    slowest = max(units / part for units, part in zip(sizes, shares, strict=True)) * sum(shares) / len(shares)
    return slowest / size


def _saved(classes: Classes, owner: Slot, part: float, is_trained: bool) -> float:
    """Return the saving on the slowest device, in operations and bytes of weights together."""
    work = classes.work[owner] * (_TRAINING_WORK if is_trained else 1.0)
    return (1.0 - part) * (work + classes.weights[owner])
