"""What each `redistribute` of a program of the sharded stage sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from distir_relax.ir import Function, Module
from distir_relax.layout import Shard, collective_between
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.reshard_plan import Transition, plan, transitions_bytes


@dataclass(frozen=True, slots=True)
class Redistribution:
    """One `redistribute`: the value it defines, its collectives with their mesh axes, the bytes each device sends.

    Bytes are counted with ring algorithms, for shards of equal size, each time that the op runs: so many `times`.
    """

    result: str
    collectives: tuple[tuple[str, str], ...]
    bytes: float
    function: str = "main"
    times: int = 1

    def __str__(self) -> str:
        if not self.bytes:
            return "sends nothing"
        steps = ", ".join(f"{name} along {axis}" for name, axis in self.collectives)
        return f"sends {self.bytes:,.0f} bytes: {steps}"


def redistributions(module: Module) -> tuple[Redistribution, ...]:
    """What each `redistribute` sends, function by function in program order."""
    times = times_of(module)
    return tuple(found for function in module.functions for found in _of(module, function, times[function.name]))


def times_of(module: Module) -> Counter[str]:
    """How many times each function runs."""
    times: Counter[str] = Counter()

    def run(function: Function, count: int) -> None:
        times[function.name] += count
        for name, calls in Counter(op.callee for op in function.ops if op.callee).items():
            run(module.function(name), count * calls)

    run(module.main, 1)
    return times


def _of(module: Module, function: Function, times: int) -> Iterator[Redistribution]:
    mesh = module.meshes[0]
    for op in function.ops:
        if Trait.REDISTRIBUTION not in lookup(op.name, op.location).traits:
            continue
        source, target = op.operands[0].dtensor, op.results[0].dtensor
        steps = plan(source, target, mesh)
        named = ((_name(step), mesh.axes[step.axis]) for step in steps)
        collectives = tuple((name, axis) for name, axis in named if name)
        sent = transitions_bytes(steps, source, mesh)
        yield Redistribution(op.results[0].name, collectives, sent, function.name, times)


def _name(step: Transition) -> str:
    """The op that does a step; nothing for a step without communication."""
    collective = collective_between(step.source, step.target)
    if isinstance(step.source, Shard) and isinstance(step.target, Shard) and step.source.dim == step.target.dim:
        return "resplit"
    return collective.value if collective else ""
