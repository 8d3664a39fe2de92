"""What the ops of a model take in the tasks of a pipeline: those of a microbatch, on a device, with their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from distir_relax.autodiff.backward import depends_on, is_differentiable
from distir_relax.cost.network import seconds_of
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.ir import Instance, Op, TensorType, Value
from distir_relax.layout import Collective
from distir_relax.ops import lookup
from distir_relax.sharding.factors import is_annotation
from distir_relax.strategies.sample_dims import Samples


@dataclass
class StageCosts:
    """Times of the ops of the entry of a program of the global stage, on one device of the machine `profile`.

    The batch is worked through in `microbatches`; a device has this `share` of the program's samples at a time. Where
    it `is_trained` an op takes its time again for each operand that has a gradient, and gradients of weights are added
    up over microbatches.
    """

    profile: Profile
    samples: Samples
    microbatches: int
    share: Fraction
    is_trained: bool
    _weights: dict[str, Value] = field(init=False)
    _graded: set[str] = field(init=False)
    _summed: set[str] = field(default_factory=set)
    _ops: dict[object, float] = field(default_factory=dict)
    _parts: dict[str, TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        function = self.samples.classes.function
        weights = {i.value.name: i.value for i in function.inputs if i.role == "parameter"}
        self._weights = weights | {
            op.results[0].name: op.results[0]
            for op in function.ops
            if is_annotation(op) and op.operands[0].name in weights
        }
        sources = {name for name, value in weights.items() if is_differentiable(value)}
        self._graded = depends_on(function.ops, sources) if self.is_trained else set()

    def of(self, numbers: Sequence[int]) -> list[float]:
        """What ops of the entry take for each microbatch, in seconds, by their numbers, which go up.

        What is done once for all samples counts by its share; sums of a weight's gradient count where it is first used.
        """
        self._summed = set()
        return [sum(map(self._seconds, self._written(self.samples.instance.ops[number]))) for number in numbers]

    def holding(self, numbers: Sequence[int]) -> list[float]:
        """The bytes of the weights that each of these ops of the entry is the first to use."""
        seen: set[str] = set()
        found = []
        for number in numbers:
            names = {v.name for op in self._written(self.samples.instance.ops[number]) for v in op.operands}
            new = {name for name in names if name in self._weights and name not in seen}
            seen |= new
            found.append(float(sum(self._weights[name].tensor.bytes for name in new)))
        return found

    def sending(self, values: Sequence[Value]) -> float:
        """What it takes to send values of the entry for a microbatch from a stage to the next."""
        sent = sum(self._part(self.samples.names[value.name], value).bytes for value in values)
        return seconds_of(self.profile, Collective.SEND, (0, 1), (sent, sent)) if sent else 0.0

    def _written(self, place: int | Instance) -> Iterator[Op]:
        if isinstance(place, Instance):
            for inner in place.ops:
                yield from self._written(inner)
        else:
            yield self.samples.classes.function.ops[place]

    def _seconds(self, op: Op) -> float:
        operands = [self._part(v.name, v) for v in op.operands]
        results = [self._part(v.name, v) for v in op.results]
        graded = [v.name for v in op.operands if v.name in self._graded]
        key = (op.name, id(op.attrs), *operands, *results)
        if key not in self._ops:
            self._ops[key] = op_seconds(self.profile, lookup(op.name, op.location), operands, op.attrs, results)
        apart = any(self.samples.dims(v.name, len(v.tensor.shape)) for v in (*op.operands, *op.results))
        share = 1.0 if apart else 1.0 / self.microbatches
        return share * self._ops[key] * (1 + len(graded)) + sum(map(self._summing, graded))

    def _summing(self, name: str) -> float:
        """What it takes to add to the gradient of a weight, where one is used for the first time."""
        if name not in self._weights or name in self._summed or self.microbatches == 1:
            return 0.0
        self._summed.add(name)
        moved = 3 * self._weights[name].tensor.bytes
        return max(self.profile.dispatch, self.profile.overhead + moved / self.profile.bandwidth)

    def _part(self, name: str, value: Value) -> TensorType:
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = self.samples.part(name, value.tensor, self.share)
        return found
