"""The algorithms of ops that are split in one of several ways, such as attention, with their communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from distir_relax.ir import Function, Input, Module, Op, Output, Value, inlined_main, producers
from distir_relax.layout import Partial, Shard
from distir_relax.lowering.to_distir import ToDistIR
from distir_relax.ops import Trait, lookup
from distir_relax.report.layout_text import pattern
from distir_relax.sharding.reshard_cost import list_reshards
from distir_relax.simulation.communication_matrix import traffic_by_kind


@dataclass(frozen=True)
class AlgorithmRow:
    """Ops of equal layers that are split along a mesh axis by one algorithm (`Split.algorithms`).

    `bytes` are those that a device sends for one of them, by collective in `collectives`: to gather its operands, to
    exchange numbers within the op, and to add up or move its results.
    """

    algorithm: str
    axis: str
    op: str
    places: tuple[str, ...]
    bytes: float
    collectives: Mapping[str, float]


def algorithm_rows(sharded: Module) -> tuple[AlgorithmRow, ...]:
    """Return the algorithms of all ops of a sharded program that have one along a mesh axis, and send for it."""
    main = inlined_main(sharded).function
    if not any(lookup(op.name, op.location).split.algorithms for op in main.ops):
        return ()
    mesh, walk = sharded.meshes[0], _Walk(sharded, main)
    groups: dict[tuple[str, str, str, str, tuple[tuple[str, float], ...]], list[str]] = defaultdict(list)
    for op in main.ops:
        inner = None
        for number, axis in enumerate(mesh.axes):
            if algorithm := _algorithm(op, number):
                inner = walk.inside(op) if inner is None else inner
                sent = walk.sent(op, number) + Counter({name: n for (name, along), n in inner.items() if along == axis})
                if sent:
                    place = op.location.split(",")[0]
                    groups[algorithm, axis, op.name, pattern(place), tuple(sorted(sent.items()))].append(place)
    return tuple(
        AlgorithmRow(algorithm, axis, name, tuple(places), sum(n for _, n in sent), dict(sent))
        for (algorithm, axis, name, _, sent), places in groups.items()
    )


def _algorithm(op: Op, axis: int) -> str:
    """Return the name of the algorithm of an op along a mesh axis; empty without one."""
    split = lookup(op.name, op.location).split
    if not split.algorithms:
        return ""
    types = [[v.dtensor.tensor for v in values] for values in (op.operands, op.results)]
    rule, cut = lookup(op.name).rule_for(types[0], op.attrs, types[1]), set[str]()
    for value, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
        placement = value.dtensor.placements[axis]
        if isinstance(placement, Shard):
            cut |= {rule.factors[index].name for index in dims[placement.dim]}
    return split.algorithms.get(" ".join(f.name for f in rule.factors if f.name in cut), "")


class _Walk:
    """The redistributions that an op causes in a function without calls."""

    def __init__(self, sharded: Module, main: Function) -> None:
        self.module = replace(sharded, functions=(main,))
        self.producers = producers(main)
        self.users: dict[str, list[Op]] = defaultdict(list)
        for op in main.ops:
            for value in op.operands:
                self.users[value.name].append(op)
        self.reshards = {reshard.result: reshard for reshard in list_reshards(self.module)}

    def sent(self, op: Op, axis: int) -> Counter[str]:
        """Return the bytes that a device sends along an axis for an op's operands and results, by collective."""
        found = {result for value in op.operands for result in self._before(value)}
        found |= {result for value in op.results for result in self._after(value, axis)}
        total, along = Counter[str](), self.module.meshes[0].axes[axis]
        for reshard in (self.reshards[result] for result in found):
            names = [name for name, at in reshard.collectives if at == along]
            # Of a redistribution along several axes, the bytes of each step are not known here.
            total += Counter({name: reshard.bytes / len(reshard.collectives) for name in names})
        return total

    def inside(self, op: Op) -> dict[tuple[str, str], float]:
        """Return the bytes that a device sends while it computes an op, by collective and axis."""
        inputs = tuple(Input(value, "input") for value in {value.name: value for value in op.operands}.values())
        outputs = tuple(Output(value.name, value) for value in op.results)
        main = Function("main", inputs, (op,), outputs)
        rows = traffic_by_kind(ToDistIR().run(replace(self.module, functions=(main,), records=())))
        return {(row.name, row.axis): (row.bytes or 0.0) / self.module.meshes[0].size for row in rows}

    def _before(self, value: Value) -> Iterator[str]:
        """Yield the redistribution that a value comes from, also if its elements were moved since."""
        op = self.producers.get(value.name)
        traits = lookup(op.name, op.location).traits if op else ()
        if op and Trait.REDISTRIBUTION in traits:
            yield op.results[0].name
        elif op and Trait.MOVES in traits:
            yield from self._before(op.operands[0])

    def _after(self, value: Value, axis: int) -> Iterator[str]:
        """Yield the redistributions of a value, also those that its elements, or a sum over devices, are moved to."""
        for op in self.users[value.name]:
            traits, is_partial = lookup(op.name, op.location).traits, _is_partial(value, axis)
            if Trait.REDISTRIBUTION in traits:
                yield op.results[0].name
            elif Trait.MOVES in traits or (is_partial and all(_is_partial(v, axis) for v in op.results)):
                for result in op.results:
                    yield from self._after(result, axis)


def _is_partial(value: Value, axis: int) -> bool:
    return isinstance(value.dtensor.placements[axis], Partial)
