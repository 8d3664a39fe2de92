"""Communication of the `redistribute` ops of a sharded program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from distir_relax.ir import Function, Module
from distir_relax.layout import Shard, collective_between
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.reshard_plan import Transition, plan, plan_bytes


@dataclass(frozen=True, slots=True)
class Reshard:
    """A `redistribute`: its result, its collectives with their mesh axes, and the bytes that each device sends.

    Bytes are per run of the op, with ring algorithms and equal shards; it runs `times` times.
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


def list_reshards(module: Module) -> tuple[Reshard, ...]:
    """Return all reshards, function by function in program order."""
    times = call_counts(module)
    return tuple(r for function in module.functions for r in _reshards(module, function, times[function.name]))


def call_counts(module: Module) -> Counter[str]:
    """Count the runs of each function."""
    times: Counter[str] = Counter()

    def run(function: Function, count: int) -> None:
        times[function.name] += count
        for name, calls in Counter(op.callee for op in function.ops if op.callee).items():
            run(module.function(name), count * calls)

    run(module.main, 1)
    return times


def _reshards(module: Module, function: Function, times: int) -> Iterator[Reshard]:
    mesh = module.meshes[0]
    for op in function.ops:
        if Trait.REDISTRIBUTION not in lookup(op.name, op.location).traits:
            continue
        source, target = op.operands[0].dtensor, op.results[0].dtensor
        steps = plan(source, target, mesh)
        pairs = ((_name(step), mesh.axes[step.axis]) for step in steps)
        collectives = tuple((name, axis) for name, axis in pairs if name)
        sent = plan_bytes(steps, source, mesh)
        yield Reshard(op.results[0].name, collectives, sent, function.name, times)


def _name(step: Transition) -> str:
    """Return the op of a step; empty for a step without communication."""
    collective = collective_between(step.source, step.target)
    if isinstance(step.source, Shard) and isinstance(step.target, Shard) and step.source.dim == step.target.dim:
        return "resplit"
    return collective.value if collective else ""
