"""What memory is for: which values of a program are gradients of weights, and what an input is."""

from __future__ import annotations

from dataclasses import dataclass, field

from distir_relax.ir import Collected, Divided, Function, Module
from distir_relax.ops import Trait, lookup

CATEGORIES = ("weights", "activations", "gradients", "optimizer state", "workspace")
"""What live memory is told apart into. Workspace is what an op needs only while it runs."""

WEIGHTS, ACTIVATIONS, GRADIENTS, STATE, WORKSPACE = range(len(CATEGORIES))

LASTING = frozenset({WEIGHTS, GRADIENTS, STATE})
"""What is kept through a step, or from step to step."""

OF_ROLE = {"input": ACTIVATIONS, "parameter": WEIGHTS, "constant": WEIGHTS, "state": STATE}
"""The category of an input, by its role."""


def assembled_outputs(module: Module) -> list[tuple[Collected, bool]]:
    """The outputs that rank 0 collects, each with whether it takes room there: device 0 does not hold all of it."""
    records = {record.output: record for record in module.records if isinstance(record, Collected)}
    found = []
    for output in module.main.outputs:
        if (record := records.get(output.name)) is not None:
            kind = output.value.placed
            held = kind.local(kind.devices.index(0)).bytes if 0 in kind.devices else 0
            found.append((record, held != record.bytes))
    return found


def joined_outputs(module: Module) -> list[Divided]:
    """The outputs that come in microbatches, which rank 0 joins."""
    return [record for record in module.records if isinstance(record, Divided) and record.role == "output"]


@dataclass
class Gradients:
    """Which values are gradients of weights: those that an optimizer takes as such, and what they are summed from."""

    module: Module
    _known: dict[tuple[str, tuple[bool, ...]], tuple[frozenset[str], tuple[bool, ...]]] = field(default_factory=dict)

    def of(self, function: Function, outputs: tuple[bool, ...]) -> frozenset[str]:
        """The gradients among the values of `function`, some of whose `outputs` are known to be such."""
        return self._find(function, outputs)[0]

    def _find(self, function: Function, outputs: tuple[bool, ...]) -> tuple[frozenset[str], tuple[bool, ...]]:
        key = (function.name, outputs)
        if key in self._known:
            return self._known[key]
        found = {o.value.name for o, wanted in zip(function.outputs, outputs, strict=True) if wanted}
        for op in reversed(function.ops):
            if op.callee:
                callee = self.module.function(op.callee)
                _, inputs = self._find(callee, tuple(v.name in found for v in op.results))
                found.update(v.name for v, wanted in zip(op.operands, inputs, strict=True) if wanted)
                continue
            entry = lookup(op.name, op.location)
            if entry.cost.weight_gradient is not None:
                found.add(op.operands[entry.cost.weight_gradient].name)
            elif any(v.name in found for v in op.results) and _passes(op.name, op.location):
                found.update(v.name for v in op.operands)
        values = frozenset(found)
        self._known[key] = values, tuple(i.value.name in values for i in function.inputs)
        return self._known[key]


def _passes(name: str, location: str) -> bool:
    """Whether an op whose result is a gradient got it from gradients: it moves them, or adds them up."""
    entry = lookup(name, location)
    return (
        Trait.COMMUNICATES in entry.traits
        or Trait.VIEW in entry.traits
        or (Trait.POINTWISE in entry.traits and bool(entry.semantics.linear))
    )
