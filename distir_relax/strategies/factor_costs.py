"""Work and traffic of each factor class of a program: what a split of it saves and sends.

A class is a dim wherever it appears in a model: the samples of a batch, the heads of a layer, a vocabulary
(`sharding.factors`). The analysis knows neither models nor op names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from distir_relax.autodiff.backward import depends_on, is_differentiable
from distir_relax.cost.roofline import flops
from distir_relax.ir import Function, Module, inlined_main, memoize
from distir_relax.layout import Cut
from distir_relax.layout.partition import cut_in_elements
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, lookup
from distir_relax.sharding.factors import Factoring, Slot, factoring_of, is_annotation


@dataclass(frozen=True, slots=True)
class Classes:
    """The factor classes of an inlined program, each identified by its representative slot.

    `work` is the number of operations that a split of the class divides between devices; `sent` the bytes of its
    reductions and gathers; `gradient_sent` those of gradients that are sums over it: of operands without the class, of
    ops whose results have it. `weights` is the bytes of the parameters that it divides. `rivals` are classes of the
    same product: only one of them can divide it along a mesh axis.
    """

    function: Function
    factoring: Factoring
    work: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    gradient_sent: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    weights: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    rivals: dict[Slot, set[Slot]] = field(default_factory=lambda: defaultdict(set))
    exchanged: set[Slot] = field(default_factory=set)
    """The classes whose split makes devices exchange results within an op: keys of attention, the dim of a softmax."""

    def size(self, owner: Slot) -> int:
        """Return the number of units of a class."""
        return self.factoring.size(owner)

    def is_whole(self, owner: Slot) -> bool:
        """Return whether some op needs the class whole, or devices to exchange results where it is split."""
        return owner in self.factoring.blocked or owner in self.exchanged

    def of(self, name: str, dim: int) -> Slot | None:
        """Return the class that ``S[dim]`` of a value splits; None for a dim of one element or none."""
        slot = self._slot(name, dim)
        return None if slot is None else self.factoring.classes[slot]

    def cut(self, name: str, dim: int, units: Cut) -> Cut:
        """Return the cut of a dim whose class is cut into `units`."""
        slot = self._slot(name, dim)
        assert slot is not None, "a dim of a class"
        return cut_in_elements(units, *self.factoring.around(slot))

    def _slot(self, name: str, dim: int) -> Slot | None:
        slots = [(name, dim, i) for i in range(len(self.factoring.slots[name][dim]))]
        return next((slot for slot in slots if not self.factoring.is_blocked(slot)), slots[0] if slots else None)


def classes_with_weights(module: Module) -> Classes:
    """Return the classes of the inlined entry of a module of the global stage, without work and traffic."""
    classes = Classes(inlined_main(module).function, factoring_of(module))
    for item in classes.function.inputs:
        if item.role == "parameter":
            for dim in range(len(item.value.tensor.shape)):
                if (owner := classes.of(item.value.name, dim)) is not None:
                    classes.weights[owner] += item.value.tensor.bytes
    return classes


@memoize(4)
def classes_of(module: Module) -> Classes:
    """Return the classes of the inlined entry of a module of the global stage."""
    classes = classes_with_weights(module)
    function, owners = classes.function, classes.factoring.classes
    _count_gradient_traffic(classes)
    works: dict[object, float] = {}
    for op, atoms in zip(function.ops, classes.factoring.atoms, strict=True):
        if is_annotation(op):
            continue
        values = (*op.operands, *op.results)
        key = (op.name, id(op.attrs), *(v.type for v in values))
        if key not in works:
            operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
            works[key] = flops(lookup(op.name, op.location), operands, op.attrs, results)
        split: set[Slot] = set()
        exact, is_reduced = lookup(op.name, op.location).split.exact, False
        for atom in atoms:
            member = next(((v, p) for v, p in zip(values, atom.places, strict=True) if p is not None), None)
            if member is None or atom.kind == WINDOW:
                continue
            owner = owners[member[0].name, *member[1]]
            is_exchanged = atom.name in exact
            if is_exchanged:
                classes.exchanged.add(owner)
            if atom.kind == BLOCKED or is_exchanged:
                classes.sent[owner] += member[0].tensor.bytes
                continue
            if owner not in split:
                classes.work[owner] += works[key]
            split.add(owner)
            if atom.kind != PARALLEL:
                is_reduced = True
                # An all-reduce sends its operand twice.
                classes.sent[owner] += 2.0 * sum(v.tensor.bytes for v in op.results)
        if is_reduced:
            for owner in split:
                classes.rivals[owner] |= split - {owner}
    return classes


def _count_gradient_traffic(classes: Classes) -> None:
    """Count the traffic of gradients: of parameters, and of values that depend on them."""
    function, owners = classes.function, classes.factoring.classes
    parameters = [i.value for i in function.inputs if i.role == "parameter"]
    with_gradient = depends_on(function.ops, {v.name for v in parameters if is_differentiable(v)})
    for op, atoms in zip(function.ops, classes.factoring.atoms, strict=True):
        differentiated = [i for i, v in enumerate(op.operands) if v.name in with_gradient]
        for atom in atoms if differentiated else ():
            results = zip(op.results, atom.places[len(op.operands) :], strict=True)
            member = next(((v, place) for v, place in results if place is not None), None)
            if member is not None and atom.kind == PARALLEL:
                sent = sum(op.operands[i].tensor.bytes for i in differentiated if atom.places[i] is None)
                classes.gradient_sent[owners[member[0].name, *member[1]]] += 2.0 * sent
