"""Tensor parallelism found from factor classes: which dims of a model's weights are split between devices.

Column and row pairs, heads, vocabularies and experts are each one class, which the products on both sides of it share:
the first gives its part of the class, the second sums over it (Shoeybi et al., Megatron-LM, 2019). What is common to
all layers, the width of the residual stream, would divide as much work, yet send the results of every product.
"""

from __future__ import annotations

from collections.abc import Set

from distir_relax.layout.division import balanced
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.classes import Classes


def tensor_classes(classes: Classes, ranks: int, without: Set[Slot] = frozenset()) -> list[Slot]:
    """The classes to split between `ranks` devices, each product along one of them at most.

    Those come first that send least for the work and the weights that they divide; a class is left out that sends more
    bytes than it saves, one that is a rival of another which is taken, and those `without` which to do.
    """
    saved = {owner: _saved(classes, owner, ranks) for owner in classes.weights if owner not in without}
    worth = [o for o, gain in saved.items() if gain > classes.sent[o] and _may_be_split(classes, o)]
    taken: list[Slot] = []
    for owner in sorted(worth, key=lambda o: (classes.sent[o] / saved[o], o)):
        if classes.rivals[owner].isdisjoint(taken):
            taken.append(owner)
    return taken


def _may_be_split(classes: Classes, owner: Slot) -> bool:
    return classes.work[owner] > 0 and owner not in classes.factoring.blocked


def _saved(classes: Classes, owner: Slot, ranks: int) -> float:
    """What is saved on the device with the largest part, of operations and of bytes of weights together."""
    size = classes.size(owner)
    share = 1.0 - balanced(size, ranks)[0] / size
    return share * (classes.work[owner] + classes.weights[owner])
