"""A pass that changes the order of two all-reduces: on all ranks that is safe, on one of them it is refused.

    distir show x.dist --stage ranked > ranked.txt
    distir opt ranked.txt --import examples/reorder_sums.py --passes exchange-sums --verify
    distir opt ranked.txt --import examples/reorder_sums.py --passes exchange-sums{rank=0} --verify

With `--verify`, programs of ranks are compared after each pass: along every group they must do the same communications
in the same order. The second command ends with the all-reduce that would meet another one, and its line in the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from distir_relax.compiler.pass_text import register_pass
from distir_relax.ir import Function, Module, Op
from distir_relax.layout import Collective
from distir_relax.ops import lookup


@register_pass
@dataclass(frozen=True)
class ExchangeSums:
    """Exchange the first two independent all-reduces, in the programs of all ranks or of `rank`."""

    rank: int = -1

    takes: ClassVar[tuple[str, ...]] = ("ranked",)
    gives: ClassVar[str] = "ranked"

    def run(self, module: Module) -> Module:
        """Return the programs with another order; a single rank gets a program of its own."""
        if self.rank < 0:
            return replace(module, functions=tuple(exchanged(f) for f in module.functions))
        own = module.function(module.ranks[self.rank])
        name = f"{own.name}_exchanged"
        ranks = tuple(name if rank == self.rank else other for rank, other in enumerate(module.ranks))
        others = [
            function for function in module.functions if function.name in ranks or function.name not in module.ranks
        ]
        return replace(module, functions=(replace(exchanged(own), name=name), *others), ranks=ranks)


def exchanged(function: Function) -> Function:
    """Return a function whose first two independent all-reduces are exchanged: the first one moves behind the second.

    So do the ops between them that use its result.
    """
    numbers = [number for number, op in enumerate(function.ops) if is_sum(op)]
    for first, second in pairwise(numbers):
        late = {value.name for value in function.ops[first].results}
        moved, kept = [function.ops[first]], []
        for op in function.ops[first + 1 : second + 1]:
            depends = any(value.name in late for value in op.operands)
            (moved if depends else kept).append(op)
            late.update(value.name for value in op.results if depends)
        if function.ops[second] in kept:
            return replace(function, ops=(*function.ops[:first], *kept, *moved, *function.ops[second + 1 :]))
    return function


def is_sum(op: Op) -> bool:
    """Whether an op is an all-reduce, by its entry."""
    return lookup(op.name, op.location).cost.collective is Collective.ALL_REDUCE
