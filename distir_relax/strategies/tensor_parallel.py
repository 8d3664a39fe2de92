"""Tensor parallelism found from factor classes: which dims of a model's weights are split between devices.

Column and row pairs, heads, vocabularies and experts are each one class, which the products on both sides of it share:
the first gives its part of the class, the second sums over it (Shoeybi et al., Megatron-LM, 2019). What is common to
all layers, the width of the residual stream, would divide as much work, yet send the results of every product. In a
chain of products each class is a rival of the next; what is best is every second one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from distir_relax.cost.roofline import FLOPS_PER_BYTE
from distir_relax.layout.partition import proportional
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes
from distir_relax.strategies.max_weight_independent_set import heaviest_independent

_TRAINED = 3.0
"""How much work a step of training is, in forwards: a product has two in its backward."""


def tensor_classes(
    classes: Classes,
    ranks: int,
    without: Set[Slot] = frozenset(),
    is_trained: bool = False,
    shares: Sequence[float] = (),
) -> frozenset[Slot]:
    """The classes to split between `ranks` devices, each product along one of them at most.

    They are those that save most together, each for the share of its time in which devices compute and do not send. A
    class is left out that sends more bytes than it saves, and those `without` which to do. Of a model that `is_trained`
    the backward counts, too. Devices get `shares` of the work, equal ones unless given.
    """
    gains: dict[Slot, float] = {}
    for owner in classes.weights:
        saved, sent = _saved(classes, owner, shares or (1.0,) * ranks, is_trained), classes.sent[owner]
        if is_trained:
            sent += classes.returned[owner]
        if owner not in without and saved > sent and _may_be_split(classes, owner):
            gains[owner] = saved * saved / (saved + FLOPS_PER_BYTE * sent)
    return frozenset(heaviest_independent(gains, classes.rivals))


def _may_be_split(classes: Classes, owner: Slot) -> bool:
    return classes.work[owner] > 0 and owner not in classes.factoring.blocked


def _saved(classes: Classes, owner: Slot, shares: Sequence[float], is_trained: bool) -> float:
    """What is saved on the device that has most for its speed, of operations and of bytes of weights together."""
    size = classes.size(owner)
    sizes = proportional(size, shares)
    longest = max(n / part for n, part in zip(sizes, shares, strict=True)) * sum(shares) / len(shares)
    share = 1.0 - longest / size
    work = classes.work[owner] * (_TRAINED if is_trained else 1.0)
    return share * (work + classes.weights[owner])
