"""A pass added from outside: two all-reduces become one.

What a small all-reduce takes is mostly latency. Where two of them wait for nothing of each other, one all-reduce of
both tensors, one after the other, is nearly twice as fast. Run me::

    python examples/extend/add_pass.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import distir_relax as dr
from distir_relax.compiler.pass_manager import Observer
from distir_relax.compiler.pass_text import register_pass
from distir_relax.ir import Function, Module, Op, Pass, Value, fresh_name
from distir_relax.layout import Collective
from distir_relax.ops import lookup


@register_pass  # distir opt --import add_pass.py --passes join-reductions
@dataclass(frozen=True)
class JoinReductions:
    """The pass: distributed stage in and out. All-reduces of up to `largest` bytes wait for another to go with."""

    largest: int = 1 << 20  # options are fields; a dump names those that are not as by default

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"

    def run(self, module: Module) -> Module:
        """A new program: all of the IR is frozen, and what passes have found so far stays with the module."""
        return replace(module, functions=tuple(self._function(function) for function in module.functions))

    def _function(self, function: Function) -> Function:
        taken = {i.value.name for i in function.inputs} | {v.name for op in function.ops for v in op.results}
        ops: list[Op] = []
        held: list[Op] = []  # an all-reduce that waits for one to go with, and what needs its result
        for op in function.ops:
            joins = self._joins(op)
            needs = any(value in other.results for value in op.operands for other in held)
            updates = bool(lookup(op.name, op.location).updates or op.callee)
            if held and joins and not needs and fit(held[0], op):
                ops += [*joined(held[0], op, taken), *held[1:]]
                held = []
            elif needs and not joins and not updates:
                held.append(op)
            else:
                if joins or updates:
                    ops += held
                    held = []
                (held if joins else ops).append(op)
        return replace(function, ops=(*ops, *held))

    def _joins(self, op: Op) -> bool:
        # What an op is, its entry says: no pass asks for names. One on a stream has its time to itself already.
        if lookup(op.name, op.location).cost.collective is not Collective.ALL_REDUCE or "stream" in op.attrs:
            return False
        return op.operands[0].placed.local(0).bytes <= self.largest


def fit(first: Op, second: Op) -> bool:
    """Whether two all-reduces can be one: they are alike, and their tensors can follow each other along dim 0."""
    a, b = first.operands[0].placed, second.operands[0].placed
    return (
        (first.name, first.attrs, a.dtype, a.devices) == (second.name, second.attrs, b.dtype, b.devices)
        and a.shape[1:] == b.shape[1:]
        and all(kind.shape and isinstance(kind.shape[0], int) for kind in (a, b))
    )


def joined(first: Op, second: Op, taken: set[str]) -> list[Op]:
    """One all-reduce in the place of two; its results are theirs, so that whoever uses them need not know."""
    a, b = first.operands[0], second.operands[0]
    rows = tuple(value.placed.local(0).shape[0] for value in (a, b))
    kind = replace(a.placed, shape=(sum(rows), *a.placed.shape[1:]))
    both, whole = (Value(fresh_name(hint, taken), kind) for hint in ("both.partial", "both"))
    return [
        Op("concat", (a, b), (both,), {"axis": 0}, second.location),
        Op(first.name, (both,), (whole,), first.attrs, second.location),
        Op("split", (whole,), (*first.results, *second.results), {"axis": 0, "sizes": rows}, second.location),
    ]


class CountReductions(Observer):
    """Looks on: how many all-reduces the program has after each pass."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """Count those of all functions."""
        collectives = [lookup(op.name).cost.collective for function in module.functions for op in function.ops]
        self.counts[type(step).__name__] = collectives.count(Collective.ALL_REDUCE)


def with_joined_reductions(passes: Sequence[Pass]) -> list[Pass]:
    """A pipeline with the pass in its place: where programs have become distributed."""
    place = next(number for number, step in enumerate(passes, 1) if step.gives == "distributed")
    return [*passes[:place], JoinReductions(), *passes[place:]]


class Heads(torch.nn.Module):
    """Two heads beside each other, each with its hidden dim split: each ends in an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_2 = torch.nn.Linear(6, 10), torch.nn.Linear(6, 7)
        self.down, self.down_2 = torch.nn.Linear(10, 4), torch.nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(self.up(x).relu()).tanh(), self.down_2(self.up_2(x).relu()).sigmoid()


def main() -> None:
    """Compile a model with the pass in its place, for three ranks, and compare what they give with torch."""
    model, x = Heads().eval(), torch.randn(5, 6)
    mesh = dr.DeviceMesh((3,), ("tp",))
    count = CountReductions()
    plan = dr.compile(
        model, (x,), shardings={"up*.weight": "S[0]"}, mesh=mesh,
        passes=with_joined_reductions, observers=[count], verify=True,
    )  # fmt: skip
    assert (count.counts["ToDistIR"], count.counts["JoinReductions"]) == (2, 1), count.counts
    for found, expected in zip(plan(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    print(plan.text("distributed"))


if __name__ == "__main__":
    main()
