"""Cut a model into pipeline stages: functions whose calls are tasks.

The ops that use weights and process each microbatch separately are cut, in program order, where their cost balances.
Outside of stages remain values that are the same for all microbatches (positions, weights in another dtype), values of
inputs alone (masks, labels), and ops that join microbatches (a loss that is a mean over all samples), with all that
depends on them. Equal stages are one function, which is differentiated and sharded once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Frame
from distir_relax.ir import CachedState, Function, Module, Op, Value
from distir_relax.ir.outline import Region, outline_regions, region_key
from distir_relax.layout import typical_value
from distir_relax.ops import lookup
from distir_relax.sharding.factors import is_annotation
from distir_relax.strategies.chain_partition import balanced_cuts
from distir_relax.strategies.sample_dims import Samples
from distir_relax.strategies.stage_costs import StageCosts


def weight_origins(main: Function) -> dict[str, str]:
    """Return the parameter of each value that is one, in another layout or dtype, by name."""
    origins = {item.value.name: item.value.name for item in main.inputs if item.role == "parameter"}
    for op in main.ops:
        if len(op.operands) == 1 and op.operands[0].name in origins and not op.callee:
            origins.update((v.name, origins[op.operands[0].name]) for v in op.results)
    return origins


def count_places(module: Module) -> int:
    """Return the most stages that a program of the global stage can be cut into, with several microbatches."""
    return len(_StageOps.of(module, Samples.of(module), divided=True).starts(module.main))


@dataclass(frozen=True, slots=True)
class CutStages:
    """Pass within the global stage: cut the model into `count` stages, functions that are called by tasks.

    `boundaries` name where each stage but the first begins: paths of modules, or names of ONNX nodes, of the model;
    `scopes` are the modules in which values are computed. Or a stage begins with the first op that uses one of its
    `weights`, which are those of each stage in another program of the model. Without either, stages are cut where the
    cost of their tasks on `profile` balances: of a microbatch, on one of `data` devices, with its backward if the model
    `is_trained`; `samples` is their number if it is less than the program's. On heterogeneous devices, stages have
    `speeds`, and at most `memory` bytes of weights. With several `microbatches` no stage contains an op that joins
    them. Raises `DistIRError` for a model that has fewer parts than stages, and for a boundary that is not in the
    model, is inside of a block, or does not follow the one before.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    count: int
    profile: Profile = field(repr=False)
    boundaries: tuple[str, ...] = ()
    microbatches: int = 1
    data: int = 1
    is_trained: bool = False
    samples: int | None = None
    scopes: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict, repr=False)
    speeds: tuple[float, ...] = field(default=(), repr=False)
    memory: tuple[float, ...] = field(default=(), repr=False)
    weights: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    def run(self, module: Module) -> Module:
        """Return the module with a call for each stage."""
        main = module.main
        samples = Samples.of(module)
        ops = _StageOps.of(module, samples, self.microbatches > 1)
        if (places := len(ops.starts(main))) < self.count:
            raise self._too_few(main, ops, places)
        if self.weights:
            firsts = self._by_weights(main, ops.body)
        else:
            firsts = self._by_name(main, ops.body) if self.boundaries else self._by_cost(module, samples, ops.body)
        ends = (*firsts, len(ops.body))
        stages = [
            Region(tuple(ops.body[a:b]), kind="Stage", attrs={"stage": number, "kind": "F", "microbatch": 0})
            for number, (a, b) in enumerate(zip((0, *firsts), ends, strict=True))
        ]
        groups: dict[object, list[Region]] = defaultdict(list)
        for stage in stages:
            groups[region_key(main, stage)].append(stage)
        outlined = outline_regions(main, list(groups.values()), {f.name for f in module.functions}, ops.roles)
        assert outlined is not None, "stages are consecutive"
        return replace(module, functions=(outlined[0], *module.functions[1:], *outlined[1]))

    def _too_few(self, main: Function, ops: _StageOps, places: int) -> DistIRError:
        count = f"the model has {places} consecutive ops with weights"
        problem = f"too few for {self.count} stages"
        if ops.join is None:
            return DistIRError(f"{count}, {problem}", hint="use fewer stages")
        op = main.ops[ops.join]
        return DistIRError(
            f"{count} before {op.name} joins the microbatches, {problem}",
            op.location,
            "use one microbatch, or a model that does not join samples (a batch norm does, in training)",
        )

    def _by_cost(self, module: Module, samples: Samples, body: Sequence[int]) -> list[int]:
        """Return the number in the body of the first op of each stage but the first, by cost.

        Raises `DistIRError` if stages would have to begin between the use of a state and its next value.
        """
        main = module.main
        size = typical_value(samples.size)
        share = Fraction(self.samples or size, size * self.microbatches * self.data)
        costs = StageCosts(self.profile, samples, self.microbatches, share, self.is_trained)
        # Ops after the stages run on the devices of the last one.
        in_body = set(body)
        rest = [number for number in range(body[0] + 1, len(main.ops)) if number not in in_body]
        op_costs = costs.of(body)
        op_costs[-1] += sum(costs.of(rest))
        crossing = [costs.send_seconds(values) for values in _crossing(main, body)]
        # An annotation alone is no stage: it goes with the op before it.
        for index in range(1, len(body)):
            if is_annotation(main.ops[body[index]]):
                crossing[index] = math.inf
        # A state is used, and its next value computed, on the same devices.
        for number in _within_updates(module, body):
            crossing[number] = math.inf
        if (places := sum(map(math.isfinite, crossing[1:]))) < self.count - 1:
            raise DistIRError(
                f"the model has {places} places to begin a stage without a state that is used before and updated after,"
                f" too few for {self.count} stages",
                hint="use fewer stages",
            )
        return balanced_cuts(op_costs, crossing, self.count, self.speeds, costs.weight_bytes(body), self.memory)

    def _by_weights(self, main: Function, body: Sequence[int]) -> list[int]:
        """Return the number in the body of the first op of each stage but the first, by the weights of the stages."""
        stages: dict[str, set[int]] = defaultdict(set)
        for stage, names in enumerate(self.weights):
            for name in names:
                stages[name].add(stage)
        # A weight of several stages says nothing.
        own = {name: min(found) for name, found in stages.items() if len(found) == 1}
        origins = weight_origins(main)
        used = [{own[o] for v in main.ops[n].operands if (o := origins.get(v.name, "")) in own} for n in body]
        firsts: list[int] = []
        for index, stages_of_op in enumerate(used):
            firsts += [index] * (max(stages_of_op, default=0) - len(firsts))
        # A stage without weights of its own has the last ops before the next stage, or at the end.
        firsts += [len(body)] * (self.count - 1 - len(firsts))
        for stage in range(self.count - 2, -1, -1):
            firsts[stage] = min(firsts[stage], (*firsts, len(body))[stage + 1] - 1)
        spans = enumerate(zip((0, *firsts), (*firsts, len(body)), strict=True))
        if firsts[0] < 1 or any(used[index] - {stage} for stage, span in spans for index in range(*span)):
            raise DistIRError(
                f"expected ops for each of {self.count} stages, found too few: a stage of the step has no weights",
                hint="use fewer stages, or name where they begin with stages=",
            )
        return firsts

    def _by_name(self, main: Function, body: Sequence[int]) -> list[int]:
        """Return the number in the body of the first op of each stage but the first, by the user's boundaries."""
        if len(self.boundaries) != self.count - 1:
            raise DistIRError(
                f"{self.count} stages have {self.count - 1} boundaries, found {len(self.boundaries)}: "
                f"{', '.join(self.boundaries)}",
                hint="name the module that each stage but the first begins with",
            )
        firsts: list[int] = []
        for boundary in self.boundaries:
            index = next((i for i, number in enumerate(body) if self._is_in(main.ops[number], boundary)), None)
            if index is None:
                raise DistIRError(
                    f"no stage can begin with {boundary!r}", hint=self._modules(main, body) or "name one of its modules"
                )
            if index <= (firsts[-1] if firsts else 0):
                last = repr(self.boundaries[len(firsts) - 1]) if firsts else "the beginning of the model"
                raise DistIRError(f"the stage that begins with {boundary!r} would be empty: it does not follow {last}")
            firsts.append(index)
        return firsts

    def _is_in(self, op: Op, path: str) -> bool:
        frames = (frame for v in op.results for frame in self.scopes.get(v.name, ()))
        return op.location.endswith(f":{path}") or any(frame.path == path for frame in frames)

    def _modules(self, main: Function, body: Sequence[int]) -> str:
        values = (v.name for number in body for v in main.ops[number].results)
        paths = dict.fromkeys(frame.path for name in values for frame in self.scopes.get(name, ()) if frame.path)
        names = list(paths)[:12]
        return f"the model has {', '.join(names)}{', …' if len(paths) > len(names) else ''}" if names else ""


@dataclass(frozen=True, slots=True)
class _StageOps:
    """The numbers of the entry's ops that stages are cut from, and the roles of values computed outside of them."""

    body: tuple[int, ...]
    roles: Mapping[str, str]
    join: int | None = None
    """The first op on values of weights that joins samples, if weights are used after it."""

    def starts(self, main: Function) -> list[int]:
        """Return the numbers of the ops that a stage may begin with."""
        return [number for number in self.body if not is_annotation(main.ops[number])]

    @staticmethod
    def of(module: Module, samples: Samples, divided: bool) -> _StageOps:
        """Return the ops on samples and weights; if `divided`, only those that keep samples apart.

        Dependence is that of the inlined program: a block that passes on a seed has a result that depends on no sample,
        which does not join samples.
        """
        main, inputs = module.main, module.main.inputs
        sampled = set(samples.inputs) if divided else {i.value.name for i in inputs if i.role == "input"}
        varying = samples.dependent(sampled)
        weights = samples.dependent({i.value.name for i in inputs if i.role == "parameter"})
        joined: set[str] = set()
        """Values that join samples, and those that depend on them."""
        body: list[int] = []
        join: int | None = None
        is_used_later = False
        roles: dict[str, str] = {}
        for number, op in enumerate(main.ops):
            names, varying_results = [v.name for v in op.operands], [v for v in op.results if v.name in varying]
            uses_weights = any(name in weights for name in names)
            if not varying_results:
                roles.update((v.name, "parameter" if v.name in weights else "constant") for v in op.results)
                continue
            joins_samples = divided and not all(map(samples.has, varying_results))
            if joins_samples or any(name in joined for name in names) or _updates_in_place(op):
                joined.update(v.name for v in varying_results)
                join = number if join is None and uses_weights else join
                is_used_later = is_used_later or any(name in weights and name not in varying for name in names)
            elif uses_weights:
                body.append(number)
        return _StageOps(tuple(body), roles, join if is_used_later else None)


def _updates_in_place(op: Op) -> bool:
    """Return whether an op updates a persistent value: the entry does it once."""
    return not op.callee and lookup(op.name, op.location).updates


def _within_updates(module: Module, body: Sequence[int]) -> set[int]:
    """Return the numbers in the body of ops after the first use of a state, up to the one with its next value."""
    main = module.main
    outputs = {o.name: o.value.name for o in main.outputs}
    states = {r.input: outputs[r.output] for r in module.records if isinstance(r, CachedState)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, number in enumerate(body):
        for value in main.ops[number].operands:
            first.setdefault(value.name, index)
        last.update((v.name, index) for v in main.ops[number].results)
    return {
        index
        for state, following in states.items()
        if state in first
        for index in range(first[state] + 1, last.get(following, -1) + 1)
    }


def _crossing(main: Function, body: Sequence[int]) -> list[list[Value]]:
    """Return for each op of the body the values of earlier ops that it or later ones use."""
    index = {number: i for i, number in enumerate(body)}
    producers: dict[str, tuple[int, Value]] = {}
    last_use: dict[str, int] = {}
    for number, op in enumerate(main.ops):
        if number in index:
            producers.update((v.name, (index[number], v)) for v in op.results)
            last_use.update((v.name, index[number]) for v in op.operands)
    crossing: list[list[Value]] = [[] for _ in body]
    for name, (start, value) in producers.items():
        for i in range(start + 1, last_use.get(name, start) + 1):
            crossing[i].append(value)
    return crossing
