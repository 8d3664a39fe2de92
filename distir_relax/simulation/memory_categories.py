"""Memory categories: weights, activations, gradients, optimizer state, and workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

from distir_relax.ir import Function, MicrobatchParts, Module, OutputAssembly
from distir_relax.ops import Trait, lookup

CATEGORIES = ("weights", "activations", "gradients", "optimizer state", "workspace")
"""Categories of live memory. Workspace is memory that an op needs only while it runs."""

WEIGHTS, ACTIVATIONS, GRADIENTS, STATE, WORKSPACE = range(len(CATEGORIES))

RESIDENT = frozenset({WEIGHTS, GRADIENTS, STATE})
"""Categories that live through a step, or across steps."""

ROLE_CATEGORY = {
    "input": ACTIVATIONS, "sized": ACTIVATIONS, "parameter": WEIGHTS, "constant": WEIGHTS, "state": STATE,
}  # fmt: skip
"""The category of an input, by role."""


def assembled_outputs(module: Module) -> list[tuple[OutputAssembly, bool]]:
    """Return the outputs that rank 0 assembles, and whether that needs memory: device 0 does not have all of it."""
    records = {record.output: record for record in module.records if isinstance(record, OutputAssembly)}
    result = []
    for output in module.main.outputs:
        if (record := records.get(output.name)) is not None:
            type_ = output.value.placed
            local_bytes = type_.local(type_.devices.index(0)).bytes if 0 in type_.devices else 0
            result.append((record, local_bytes != record.bytes))
    return result


def joined_outputs(module: Module) -> list[MicrobatchParts]:
    """Return the outputs computed per microbatch, which rank 0 concatenates."""
    return [record for record in module.records if isinstance(record, MicrobatchParts) and record.role == "output"]


@dataclass
class WeightGradients:
    """Weight gradients: values that an optimizer takes as such, and the values that they are sums of."""

    module: Module
    _cache: dict[tuple[str, tuple[bool, ...]], tuple[frozenset[str], tuple[bool, ...]]] = field(default_factory=dict)

    def of(self, function: Function, outputs: tuple[bool, ...]) -> frozenset[str]:
        """Return the gradients among the values of `function`, given which of its `outputs` are gradients."""
        return self._find(function, outputs)[0]

    def _find(self, function: Function, outputs: tuple[bool, ...]) -> tuple[frozenset[str], tuple[bool, ...]]:
        key = (function.name, outputs)
        if key in self._cache:
            return self._cache[key]
        gradients = {o.value.name for o, is_gradient in zip(function.outputs, outputs, strict=True) if is_gradient}
        for op in reversed(function.ops):
            if op.callee:
                callee = self.module.function(op.callee)
                _, inputs = self._find(callee, tuple(v.name in gradients for v in op.results))
                gradients.update(v.name for v, is_gradient in zip(op.operands, inputs, strict=True) if is_gradient)
                continue
            entry = lookup(op.name, op.location)
            if entry.cost.weight_gradient is not None:
                gradients.add(op.operands[entry.cost.weight_gradient].name)
            elif any(v.name in gradients for v in op.results) and _propagates_gradient(op.name, op.location):
                gradients.update(v.name for v in op.operands)
        values = frozenset(gradients)
        self._cache[key] = values, tuple(i.value.name in values for i in function.inputs)
        return self._cache[key]


def _propagates_gradient(name: str, location: str) -> bool:
    """Whether a gradient result implies gradient operands: the op moves or adds them."""
    entry = lookup(name, location)
    return (
        Trait.COMMUNICATES in entry.traits
        or Trait.VIEW in entry.traits
        or (Trait.POINTWISE in entry.traits and bool(entry.semantics.linear))
    )
