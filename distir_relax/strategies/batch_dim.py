"""Find the batch of a model: the dim that counts samples, wherever it appears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.errors import DistIRError
from distir_relax.ir import Input
from distir_relax.layout import is_always
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes


@dataclass(frozen=True, slots=True)
class Batch:
    """The class of the samples: its dim in each input, by name, and the number of samples."""

    owner: Slot
    dims: Mapping[str, int]
    size: int


def find_batch(classes: Classes) -> Batch:
    """Return the batch of a program: a class of dims of inputs that no parameter has.

    First dims of inputs are tried first, then second ones, and so on; of several candidates the one with most work is
    taken. A class that some op needs replicated (a sort of all tokens, for experts) is taken only if there is no other:
    it is gathered there. Raises `DistIRError` for a model without a batch.
    """
    inputs = [item for item in classes.function.inputs if item.role == "input"]
    dims = range(max((len(i.value.tensor.shape) for i in inputs), default=0))
    for blocked in (False, True):
        for dim in dims:
            owners = {_class(classes, item, dim) for item in inputs}
            candidates = [o for o in owners if o is not None and _is_candidate(classes, o, blocked)]
            if candidates:
                return _batch(classes, inputs, max(candidates, key=lambda o: (classes.work[o], o)))
    reasons = [_reason(classes, item) for item in inputs]
    raise DistIRError(
        f"the model has no batch that can be split: {'; '.join(reasons) or 'it has no inputs'}",
        hint="give an example with several samples, or a strategy with 1 as its first and its last number",
    )


def find_sequence(classes: Classes, batch: Batch | None, ranks: int) -> Batch:
    """Return the sequence of a program: the class of another dim of inputs, the first that no parameter has.

    Without one, that of an inner dim that parameters have too, such as a bias of each pair of positions. Of several
    candidates the one with most work is taken. Raises `DistIRError` for a model without one, and for a sequence that is
    shorter than the number of its `ranks`.
    """
    inputs = [item for item in classes.function.inputs if item.role == "input"]
    # Of a batch of one sample, the positions take the place of the samples.
    samples = batch.owner if batch is not None and 0 in batch.dims.values() else None
    most = max((len(i.value.tensor.shape) for i in inputs), default=0)
    for is_free, dim in ((is_free, dim) for is_free in (True, False) for dim in range(most)):
        owners = {_class(classes, item, dim) for item in inputs if is_free or dim < len(item.value.tensor.shape) - 1}
        candidates = [
            o for o in owners - {samples}
            if o is not None and classes.work[o] > 0 and not (is_free and o in classes.weights)
        ]  # fmt: skip
        if not candidates:
            continue
        found = _batch(classes, inputs, max(candidates, key=lambda o: (classes.work[o], o)))
        if is_always(found.size, "<", ranks):
            raise DistIRError(
                f"a sequence of {found.size} positions is too short for {ranks} devices", f"strategy context={ranks}",
                "give an example of a longer sequence",
            )  # fmt: skip
        return found
    raise DistIRError(
        "the model has no sequence that can be split: no dim of its inputs besides the batch is free of parameters",
        f"strategy context={ranks}",
        "remove context, or annotate the dim: shardings={'INPUT': 'S[1]'}",
    )


def _batch(classes: Classes, inputs: Sequence[Input], owner: Slot) -> Batch:
    dims = {}
    for item in inputs:
        matches = (d for d in range(len(item.value.tensor.shape)) if _class(classes, item, d) == owner)
        if (first := next(matches, None)) is not None:
            dims[item.value.name] = first
    return Batch(owner, dims, classes.size(owner))


def _is_candidate(classes: Classes, owner: Slot, blocked: bool) -> bool:
    return owner not in classes.weights and classes.work[owner] > 0 and (blocked or not classes.is_whole(owner))


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
        return f"dim 0 of {item.value.name!r} is a dim of parameters as well"
    return f"no op computes along dim 0 of {item.value.name!r}"
