"""Errors that the ops of a plan in low precision add, against the model in another precision.

An op's result carries the errors of all ops before it. To tell them apart, the model's op runs on the operands that the
plan computed: the difference from the plan's result is the error that the op adds, by its weights or its arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.bisection.reference import Reference, ReferenceValue, run_op
from distir_relax.bisection.result import OpError
from distir_relax.bisection.rounding import relative_rms
from distir_relax.bisection.search import Search
from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    import torch


def rank_errors(search: Search, model: Reference) -> list[OpError]:
    """Return the errors of all values that a plan and the `model` have, the largest added error first.

    The reference of `search` is not used. Raises `DistIRError` if they have no value in common.
    """
    own = search.layouts
    shapes = {v.name: (op, v.dtensor.shape) for op in model.module.main.ops for v in op.results}
    producers = {name: op for name, (op, _) in shapes.items()}
    common = [name for name, (_, shape) in shapes.items() if name in own.local and own.layouts[name].shape == shape]
    if not common:
        raise DistIRError(
            "the two bundles have no value in common",
            hint="compare bundles of one model, with the same number of microbatches",
        )
    found: list[OpError] = []
    shared = set(common)
    for chunk in search.chunks(common):
        # Operands that another chunk has are recorded again.
        needed = dict.fromkeys(v.name for name in chunk for v in producers[name].operands if v.name in shared)
        found += _errors(search, model, chunk, [*needed, *chunk])
    return sorted(found, key=lambda error: -error.added)


def _errors(search: Search, model: Reference, chunk: list[str], recorded: list[str]) -> list[OpError]:
    taps = search.record(recorded)
    chosen, wanted = set(chunk), set(recorded)
    values: dict[str, torch.Tensor] = {}
    errors: list[OpError] = []

    def visit(value: ReferenceValue) -> None:
        whole = search.layouts.assemble(value.name, taps) if value.name in wanted else None
        named = zip(value.op.operands, value.operands, strict=True)
        operands = [values.get(v.name, x).to(x.dtype) for v, x in named]
        position = [v.name for v in value.op.results].index(value.name)
        computed = run_op(value.op, operands)[position]
        if whole is None:
            values[value.name] = computed
            return
        values[value.name] = whole
        if value.name in chosen and value.tensor.is_floating_point():
            added, total = relative_rms(whole, computed), relative_rms(whole, value.tensor)
            errors.append(OpError(value.name, value.op.name, value.op.location, added, total))

    model.run(visit)
    return errors
