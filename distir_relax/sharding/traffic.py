"""What a program of the sharded stage sends."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.ir import DTensorType, Module, Partial, Replicate, Shard
from distir_relax.ops import lookup
from distir_relax.sharding.redistribute import Step, plan, steps_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """One `redistribute`: the value it defines, its collectives with their mesh axes, the bytes each device sends.

    Bytes are counted with ring algorithms, for shards of equal size.
    """

    result: str
    collectives: tuple[tuple[str, str], ...]
    bytes: float

    def __str__(self) -> str:
        if not self.bytes:
            return "sends nothing"
        steps = ", ".join(f"{name} along {axis}" for name, axis in self.collectives)
        return f"sends {self.bytes:,.0f} bytes: {steps}"


def traffic(module: Module) -> tuple[Traffic, ...]:
    """What each `redistribute` of the entry function sends, in program order."""
    mesh = module.meshes[0]
    found = []
    for op in module.main.ops:
        if lookup(op.name, op.location).role != "redistribution":
            continue
        source, target = op.operands[0].type, op.results[0].type
        assert isinstance(source, DTensorType)
        assert isinstance(target, DTensorType)
        steps = plan(source, target, mesh)
        named = ((_collective(step), mesh.axes[step.axis]) for step in steps)
        collectives = tuple((name, axis) for name, axis in named if name)
        found.append(Traffic(op.results[0].name, collectives, steps_bytes(steps, source, mesh)))
    return tuple(found)


def _collective(step: Step) -> str:
    """The collective that a step is; nothing for a step without communication."""
    match step.source, step.target:
        case Shard(dim=a), Shard(dim=b):
            return "resplit" if a == b else "all_to_all"
        case Shard(), Replicate():
            return "all_gather"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
    return ""
