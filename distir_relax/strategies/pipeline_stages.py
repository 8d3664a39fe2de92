"""A model cut into the stages of a pipeline: each a function, whose calls are tasks.

What is computed with weights, for each microbatch by itself, is cut where its cost balances, in the order of the
program. Outside of stages stays what is the same for all microbatches (positions, weights in another dtype), what is
made of inputs alone (masks, labels), and what brings microbatches together (a loss that is a mean over all samples),
with all that depends on it. Stages that are equal are one function, which is differentiated and laid out once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Frame
from distir_relax.ir import Function, Module, Op, Value
from distir_relax.ir.outline import Region, form_of, take_out
from distir_relax.ops import lookup
from distir_relax.strategies.chain_partition import balanced_cuts
from distir_relax.strategies.sample_dims import Samples
from distir_relax.strategies.stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class CutStages:
    """The pass: global stage in and out. The model is cut into `count` stages, functions that are called by tasks.

    `boundaries` name where each stage but the first begins: paths of modules, or names of ONNX nodes, of the model;
    `scopes` say in which of them values are made. Without, stages are cut where the cost of their tasks on `profile`
    balances: of a microbatch, on one of `data` devices, with its backward where the model `is_trained`; `samples`: how
    many there are, if they are fewer than the program has. Stages work at `speeds`, and hold no more bytes of weights
    than `rooms`, where devices are unlike. With several `microbatches` no stage does what brings them
    together. Raises `DistIRError` for a model that has fewer parts than stages, and for a boundary that is not in the
    model, is inside of a block, or is not behind the one before.
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
    rooms: tuple[float, ...] = field(default=(), repr=False)

    def run(self, module: Module) -> Module:
        """The module with a call for each stage."""
        main = module.main
        samples = Samples.of(module)
        parts = _Parts.of(module, samples, self.microbatches > 1)
        if len(parts.body) < self.count:
            raise self._too_few(main, parts)
        firsts = self._named(main, parts.body) if self.boundaries else self._balanced(main, samples, parts.body)
        ends = (*firsts, len(parts.body))
        stages = [
            Region(tuple(parts.body[a:b]), kind="Stage", attrs={"stage": number, "kind": "F", "microbatch": 0})
            for number, (a, b) in enumerate(zip((0, *firsts), ends, strict=True))
        ]
        equal: dict[object, list[Region]] = defaultdict(list)
        for stage in stages:
            equal[form_of(main, stage)].append(stage)
        found = take_out(main, list(equal.values()), {f.name for f in module.functions}, parts.roles)
        assert found is not None, "stages follow each other"
        return replace(module, functions=(found[0], *module.functions[1:], *found[1]))

    def _too_few(self, main: Function, parts: _Parts) -> DistIRError:
        found = f"the model has {len(parts.body)} ops with weights that follow each other"
        wanted = f"which cannot be {self.count} stages"
        if parts.meeting is None:
            return DistIRError(f"{found}, {wanted}", hint="take fewer stages")
        op = main.ops[parts.meeting]
        return DistIRError(
            f"{found}, before microbatches meet in {op.name}, {wanted}",
            op.location,
            "take one microbatch, or a model that does not join samples (a batch norm does, in training)",
        )

    def _balanced(self, main: Function, samples: Samples, body: Sequence[int]) -> list[int]:
        """Which of the ops of the body each stage but the first begins with, by cost."""
        share = Fraction(self.samples or samples.size, samples.size * self.microbatches * self.data)
        costs = StageCosts(self.profile, samples, self.microbatches, share, self.is_trained)
        # The end of the model that is in no stage is computed where the last one is.
        inside = set(body)
        rest = [number for number in range(body[0] + 1, len(main.ops)) if number not in inside]
        own = costs.of(body)
        own[-1] += sum(costs.of(rest))
        sent = [costs.sending(values) for values in _crossing(main, body)]
        return balanced_cuts(own, sent, self.count, self.speeds, costs.holding(body), self.rooms)

    def _named(self, main: Function, body: Sequence[int]) -> list[int]:
        """Which of the ops of the body each stage but the first begins with, as the user says."""
        if len(self.boundaries) != self.count - 1:
            raise DistIRError(
                f"{self.count} stages have {self.count - 1} boundaries, found {len(self.boundaries)}: "
                f"{', '.join(self.boundaries)}",
                hint="name the module that each stage but the first begins with",
            )
        firsts: list[int] = []
        for boundary in self.boundaries:
            place = next((i for i, number in enumerate(body) if self._is_in(main.ops[number], boundary)), None)
            if place is None:
                raise DistIRError(
                    f"no stage can begin with {boundary!r}", hint=self._known(main, body) or "name one of its modules"
                )
            if place <= (firsts[-1] if firsts else 0):
                before = repr(self.boundaries[len(firsts) - 1]) if firsts else "the beginning of the model"
                raise DistIRError(f"the stage that begins with {boundary!r} would be empty: it is not behind {before}")
            firsts.append(place)
        return firsts

    def _is_in(self, op: Op, path: str) -> bool:
        frames = (frame for v in op.results for frame in self.scopes.get(v.name, ()))
        return op.location.endswith(f":{path}") or any(frame.path == path for frame in frames)

    def _known(self, main: Function, body: Sequence[int]) -> str:
        values = (v.name for number in body for v in main.ops[number].results)
        paths = dict.fromkeys(frame.path for name in values for frame in self.scopes.get(name, ()) if frame.path)
        shown = list(paths)[:12]
        return f"the model has {', '.join(shown)}{', …' if len(paths) > len(shown) else ''}" if shown else ""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The numbers of the entry's ops that stages are made of, and the roles of values that are made outside of them."""

    body: tuple[int, ...]
    roles: Mapping[str, str]
    meeting: int | None = None
    """The first op, of those that weights reach, in which samples meet, where weights are used behind it."""

    @staticmethod
    def of(module: Module, samples: Samples, divided: bool) -> _Parts:
        """The ops of samples and weights that stages are cut from; where `divided`, those that keep samples apart.

        Dependence is that of the program with its calls inlined. A block that passes on a seed gives a result that
        depends on no sample, and does not bring samples together.
        """
        main, inputs = module.main, module.main.inputs
        sampled = set(samples.inputs) if divided else {i.value.name for i in inputs if i.role == "input"}
        varying = samples.dependent(sampled)
        weights = samples.dependent({i.value.name for i in inputs if i.role == "parameter"})
        together: set[str] = set()
        """What is made of several samples, or of what is."""
        body: list[int] = []
        meeting: int | None = None
        goes_on = False
        roles: dict[str, str] = {}
        for number, op in enumerate(main.ops):
            names, made = [v.name for v in op.operands], [v for v in op.results if v.name in varying]
            is_weighty = any(name in weights for name in names)
            if not made:
                roles.update((v.name, "parameter" if v.name in weights else "constant") for v in op.results)
                continue
            apart = divided and not all(map(samples.has, made))
            if apart or any(name in together for name in names) or _is_in_place(op):
                together.update(v.name for v in made)
                meeting = number if meeting is None and is_weighty else meeting
                goes_on = goes_on or any(name in weights and name not in varying for name in names)
            elif is_weighty:
                body.append(number)
        return _Parts(tuple(body), roles, meeting if goes_on else None)


def _is_in_place(op: Op) -> bool:
    """Whether an op updates what the program keeps: it is done once, by the entry."""
    return not op.callee and bool(lookup(op.name, op.location).code.in_place)


def _crossing(main: Function, body: Sequence[int]) -> list[list[Value]]:
    """For each op of the body, what those before it make and it or those behind it use."""
    place = {number: i for i, number in enumerate(body)}
    made: dict[str, tuple[int, Value]] = {}
    last: dict[str, int] = {}
    for number, op in enumerate(main.ops):
        if number in place:
            made.update((v.name, (place[number], v)) for v in op.results)
            last.update((v.name, place[number]) for v in op.operands)
    found: list[list[Value]] = [[] for _ in body]
    for name, (start, value) in made.items():
        for i in range(start + 1, last.get(name, start) + 1):
            found[i].append(value)
    return found
