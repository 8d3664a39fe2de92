"""Shorter versions of a model: a chain of equal blocks cut to its first few.

The ops of such a model grow by the same for each block, and so do the time and memory of a step. Two short versions
give those of the whole model without compiling it (`step_bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distir_relax.compiler.source import Source
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Function, Op, Value, required_ops

MIN_BLOCKS = 3
"""A shorter chain is not worth cutting."""
_MAX_PERIOD = 8
"""The largest number of calls that make a block."""


@dataclass(frozen=True)
class Chain:
    """A chain of equal blocks: the numbers of the calls of each, in order, in the entry function of the outlined
    model."""

    source: Source
    blocks: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.blocks)

    @staticmethod
    def of(source: Source) -> Chain | None:
        """Return the longest chain of a model's blocks; None if it has none of `MIN_BLOCKS` blocks."""
        imported = source.imported
        module = Outline(imported.scopes).run(imported.module)
        calls = [number for number, op in enumerate(module.main.ops) if op.callee]
        chains = [_longest(module.main, calls, period) for period in range(1, _MAX_PERIOD + 1)]
        best = max(chains, key=lambda blocks: len(blocks) * len(blocks[0]) if blocks else 0)
        outlined = replace(source, imported=replace(imported, module=module))
        return Chain(outlined, tuple(best)) if len(best) >= MIN_BLOCKS else None

    def first(self, count: int) -> Source:
        """Return the model with the first `count` blocks of the chain; what follows the last one uses theirs.

        Ops of the others alone, such as casts of their weights, are left out with them.
        """
        module = self.source.imported.module
        main = module.main
        last, end = self.blocks[count - 1], self.blocks[-1]
        kept = {
            theirs.name: mine
            for number, other in zip(last, end, strict=True)
            for mine, theirs in zip(main.ops[number].results, main.ops[other].results, strict=True)
        }
        dropped = {number for block in self.blocks[count:] for number in block}
        ops = [_with_operands(op, kept) for number, op in enumerate(main.ops) if number not in dropped]
        outputs = tuple(replace(o, value=kept.get(o.value.name, o.value), layout=None) for o in main.outputs)
        ops = [*required_ops(ops, [o.value.name for o in outputs])]
        used = {v.name for op in ops for v in op.operands} | {o.value.name for o in outputs}
        before = {v.name for op in main.ops for v in op.operands}
        inputs = tuple(item for item in main.inputs if item.value.name in used or item.value.name not in before)
        names = {item.value.name for item in inputs}
        training = self.source.training
        if training is not None and training.trained is not None:
            training = replace(training, trained=tuple(name for name in training.trained if name in names))
        short = Function(main.name, inputs, tuple(ops), outputs)
        imported = replace(self.source.imported, module=replace(module, functions=(short, *module.functions[1:])))
        return replace(self.source, imported=imported, training=training)


def _longest(main: Function, calls: Sequence[int], period: int) -> list[tuple[int, ...]]:
    """Return the longest chain of blocks of `period` calls each."""
    best: list[tuple[int, ...]] = []
    links = _Links(main)
    for start in range(period):
        blocks = [tuple(calls[i : i + period]) for i in range(start, len(calls) - period + 1, period)]
        chain = blocks[:1]
        wires: object = None
        for before, after in pairwise(blocks):
            found = links.between(before, after)
            if found is None or (wires is not None and found != wires):
                best, chain, wires = max(best, chain, key=len), [after], None
                continue
            chain, wires = [*chain, after], found
        best = max(best, chain, key=len)
    return best


class _Links:
    """The values that calls of an entry function use of each other."""

    def __init__(self, main: Function) -> None:
        self._main = main
        self._producers: dict[str, tuple[int, int]] = {}
        self._users: dict[str, list[int]] = {}
        for number, op in enumerate(main.ops):
            for i, value in enumerate(op.results):
                self._producers[value.name] = number, i
            for value in op.operands:
                self._users.setdefault(value.name, []).append(number)
        for output in main.outputs:
            self._users.setdefault(output.value.name, []).append(-1)

    def between(self, before: Sequence[int], after: Sequence[int]) -> object:
        """Return how a block uses the one before it, which nothing else does; None unless both are of equal functions,
        or if the block uses nothing of it."""
        ops = self._main.ops
        if [ops[number].callee for number in before] != [ops[number].callee for number in after]:
            return None
        inside = {*before, *after}
        if any(user not in inside for n in before for v in ops[n].results for user in self._users.get(v.name, ())):
            return None
        wires = []
        for i, number in enumerate(after):
            for j, value in enumerate(ops[number].operands):
                producer, result = self._producers.get(value.name, (-1, 0))
                if producer in before:
                    wires.append((i, j, before.index(producer), result))
        return tuple(wires) or None


def _with_operands(op: Op, values: dict[str, Value]) -> Op:
    if not any(v.name in values for v in op.operands):
        return op
    return replace(op, operands=tuple(values.get(v.name, v) for v in op.operands))
