"""The batch of a model, found from its inputs: the dim that samples are counted by, wherever it appears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.errors import DistIRError
from distir_relax.ir import Input
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes


@dataclass(frozen=True, slots=True)
class Batch:
    """The class of the samples: which `dims` of inputs it is, by their names, and how many samples there are."""

    owner: Slot
    dims: Mapping[str, int]
    size: int


def find_batch(classes: Classes) -> Batch:
    """The batch of a program: of the classes that are dims of inputs, and of no parameter.

    The first dims of inputs are looked at first, then the second, and so on; of several classes that are, the one in
    which the most work is done. One that some op needs whole (a sort of all tokens, for experts) is taken where there
    is no other: it is gathered there. Raises `DistIRError` for a model without one.
    """
    inputs = [item for item in classes.function.inputs if item.role == "input"]
    dims = range(max((len(i.value.tensor.shape) for i in inputs), default=0))
    for blocked in (False, True):
        for dim in dims:
            here = {_class(classes, item, dim) for item in inputs}
            found = [o for o in here if o is not None and _suits(classes, o, blocked)]
            if found:
                return _batch(classes, inputs, max(found, key=lambda o: (classes.work[o], o)))
    reasons = [_reason(classes, item) for item in inputs]
    raise DistIRError(
        f"the model has no batch that could be split: {'; '.join(reasons) or 'it has no inputs'}",
        hint="give an example with several samples, or a strategy with 1 as its first and its last number",
    )


def _batch(classes: Classes, inputs: Sequence[Input], owner: Slot) -> Batch:
    dims = {}
    for item in inputs:
        mine = (d for d in range(len(item.value.tensor.shape)) if _class(classes, item, d) == owner)
        if (first := next(mine, None)) is not None:
            dims[item.value.name] = first
    return Batch(owner, dims, classes.size(owner))


def _suits(classes: Classes, owner: Slot, blocked: bool) -> bool:
    is_needed_whole = owner in classes.factoring.blocked
    return owner not in classes.weights and classes.work[owner] > 0 and (blocked or not is_needed_whole)


def _class(classes: Classes, item: Input, dim: int) -> Slot | None:
    return classes.of(item.value.name, dim) if dim < len(item.value.tensor.shape) else None


def _reason(classes: Classes, item: Input) -> str:
    shape = item.value.tensor.shape
    if not shape:
        return f"{item.value.name!r} is a number"
    owner = classes.of(item.value.name, 0)
    if owner is None:
        return f"dim 0 of {item.value.name!r} has size {shape[0]}"
    if owner in classes.weights:
        return f"dim 0 of {item.value.name!r} is a dim of parameters, too"
    return f"nothing is computed for each index of dim 0 of {item.value.name!r}"
