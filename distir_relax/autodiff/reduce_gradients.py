"""Reductions of gradients over ranks in another dtype than that of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Module, Op, Value, producers
from distir_relax.ops import Builder, Trait, lookup
from distir_relax.ops.elementwise.casts import LINEAR


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Pass: global stage in and out. Sums of gradients over ranks are sums of numbers of `dtype`.

    Each gradient is cast to it and back, where all its microbatches are added up, or before it is annotated. The first
    cast counts as linear, so that `DelayReductions` moves a sum over ranks between both. It runs after `Microbatches`.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    dtype: str

    def run(self, module: Module) -> Module:
        """Insert the casts."""
        main = module.main
        producer_of = producers(main)
        outputs = list(main.gradients.values())
        annotated = {o.name: list(_annotations(producer_of, o.value)) for o in outputs}
        operands = {op.results[0].name for ops in annotated.values() for op in ops}
        g = Builder.of(main)
        g.ops = []
        for op in main.ops:
            if op.results[0].name in operands:
                op = replace(op, operands=(self._rounded(g, op.operands[0], producer_of),))
            g.ops.append(op)
        new = [o.value if annotated.get(o.name, True) else self._rounded(g, o.value, producer_of) for o in main.outputs]
        outputs = [replace(o, value=value) for o, value in zip(main.outputs, new, strict=True)]
        return replace(
            module, functions=(replace(main, ops=tuple(g.ops), outputs=tuple(outputs)), *module.functions[1:])
        )

    def _rounded(self, g: Builder, gradient: Value, producer_of: Mapping[str, Op]) -> Value:
        """Return a gradient as a number of the dtype, in its own."""
        if gradient.tensor.dtype == self.dtype:
            return gradient
        source = producer_of.get(gradient.name)
        g.location = "" if source is None else source.location
        if source is not None and source.attrs.get(LINEAR) and source.operands[0].tensor.dtype == self.dtype:
            narrow = source.operands[0]
        else:
            g.hint = f"{gradient.name}.{self.dtype}"
            narrow = g.emit("astype", gradient, dtype=self.dtype, **{LINEAR: True})
        g.hint = f"{gradient.name}.reduced"
        wide: Value = g.emit("astype", narrow, dtype=gradient.tensor.dtype)
        return wide


def _annotations(producer_of: Mapping[str, Op], value: Value) -> Iterator[Op]:
    """Iterate over the annotations of the terms of a gradient."""
    op = producer_of.get(value.name)
    if op is None:
        return
    entry = lookup(op.name, op.location)
    if Trait.ANNOTATION in entry.traits:
        yield op
    elif frozenset(range(len(op.operands))) in entry.linear_sets(len(op.operands), op.attrs) and len(op.operands) > 1:
        for operand in op.operands:
            yield from _annotations(producer_of, operand)
