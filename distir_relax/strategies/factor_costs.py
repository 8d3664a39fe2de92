"""What is known of the factor classes of a program: what a split of each would save, and what it would send.

A class is a dim wherever it appears in a model: the samples of a batch, the heads of a layer, a vocabulary
(`sharding.factors`). No model is known here, and no op by name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from distir_relax.autodiff.backward import depends_on, is_differentiable
from distir_relax.cost.roofline import flops
from distir_relax.ir import Function, Module, lately, whole_of
from distir_relax.layout import Cut
from distir_relax.layout.partition import cut_of
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, lookup
from distir_relax.sharding.factors import Factoring, Slot, factoring_of, is_annotation


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a program with its calls written out, each by the slot that stands for it.

    `work` is what the ops compute, in operations, that a split of the class divides between devices; `sent` the bytes
    that its sums take, or that must be gathered; `returned` those of the gradients that are sums over it: of operands
    that lack it, of ops whose results have it. `weights` are the bytes of the parameters that it divides. `rivals` are
    classes of which some product has one dim each: only one of them can divide it along a mesh axis.
    """

    function: Function
    factoring: Factoring
    work: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    returned: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    weights: dict[Slot, float] = field(default_factory=lambda: defaultdict(float))
    rivals: dict[Slot, set[Slot]] = field(default_factory=lambda: defaultdict(set))

    def size(self, owner: Slot) -> int:
        """How many units the class has."""
        return self.factoring.size(owner)

    def of(self, name: str, dim: int) -> Slot | None:
        """The class that ``S[dim]`` of a value would split; None for a dim of one element or none."""
        slot = self._slot(name, dim)
        return None if slot is None else self.factoring.classes[slot]

    def cut(self, name: str, dim: int, units: Cut) -> Cut:
        """How a dim is cut whose class is cut into `units`."""
        slot = self._slot(name, dim)
        assert slot is not None, "a dim of a class"
        return cut_of(units, *self.factoring.around(slot))

    def _slot(self, name: str, dim: int) -> Slot | None:
        slots = [(name, dim, i) for i in range(len(self.factoring.slots[name][dim]))]
        return next((slot for slot in slots if not self.factoring.is_blocked(slot)), slots[0] if slots else None)


def classes_with_weights(module: Module) -> Classes:
    """The classes of the entry of a module of the global stage, with calls written out; no work of theirs is counted,
    and nothing that is sent."""
    classes = Classes(whole_of(module).function, factoring_of(module))
    for item in classes.function.inputs:
        if item.role == "parameter":
            for dim in range(len(item.value.tensor.shape)):
                if (owner := classes.of(item.value.name, dim)) is not None:
                    classes.weights[owner] += item.value.tensor.bytes
    return classes


@lately(2)
def classes_of(module: Module) -> Classes:
    """The classes of the entry of a module of the global stage, with calls written out."""
    classes = classes_with_weights(module)
    function, owners = classes.function, classes.factoring.classes
    _count_returned(classes)
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
        sums = False
        for atom in atoms:
            place = next(((v, p) for v, p in zip(values, atom.places, strict=True) if p is not None), None)
            if place is None or atom.kind == WINDOW:
                continue
            owner = owners[place[0].name, *place[1]]
            if atom.kind == BLOCKED:
                classes.sent[owner] += place[0].tensor.bytes
                continue
            if owner not in split:
                classes.work[owner] += works[key]
            split.add(owner)
            if atom.kind != PARALLEL:
                sums = True
                # An all-reduce sends what it reduces twice.
                classes.sent[owner] += 2.0 * sum(v.tensor.bytes for v in op.results)
        if sums:
            for owner in split:
                classes.rivals[owner] |= split - {owner}
    return classes


def _count_returned(classes: Classes) -> None:
    """Note what gradients send: those of parameters, and of what is made of them."""
    function, owners = classes.function, classes.factoring.classes
    parameters = [i.value for i in function.inputs if i.role == "parameter"]
    graded = depends_on(function.ops, {v.name for v in parameters if is_differentiable(v)})
    for op, atoms in zip(function.ops, classes.factoring.atoms, strict=True):
        back = [i for i, v in enumerate(op.operands) if v.name in graded]
        for atom in atoms if back else ():
            made = zip(op.results, atom.places[len(op.operands) :], strict=True)
            where = next(((v, place) for v, place in made if place is not None), None)
            if where is not None and atom.kind == PARALLEL:
                lacking = sum(op.operands[i].tensor.bytes for i in back if atom.places[i] is None)
                classes.returned[owners[where[0].name, *where[1]]] += 2.0 * lacking
