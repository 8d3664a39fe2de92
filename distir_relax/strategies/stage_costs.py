"""Cost of the ops of a model in pipeline tasks: of a microbatch, on one device, with the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from distir_relax.autodiff.backward import depends_on, is_differentiable
from distir_relax.cost.network import collective_seconds
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

    The batch is processed in `microbatches`; a device has this `share` of the program's samples at a time. If it
    `is_trained`, an op takes its time again for each operand that has a gradient, and gradients of weights are
    accumulated over microbatches.
    """

    profile: Profile
    samples: Samples
    microbatches: int
    share: Fraction
    is_trained: bool
    _weights: dict[str, Value] = field(init=False)
    _with_gradient: set[str] = field(init=False)
    _accumulated: set[str] = field(default_factory=set)
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
        self._with_gradient = depends_on(function.ops, sources) if self.is_trained else set()

    def of(self, numbers: Sequence[int]) -> list[float]:
        """Return the seconds of ops of the entry per microbatch, by their ascending numbers.

        An op that runs once for all samples counts by its share; a weight's gradient is accumulated at its first use.
        """
        self._accumulated = set()
        return [sum(map(self._seconds, self._inlined_ops(self.samples.instance.ops[number]))) for number in numbers]

    def weight_bytes(self, numbers: Sequence[int]) -> list[float]:
        """Return the bytes of the weights that each of these ops of the entry is the first to use."""
        seen: set[str] = set()
        bytes_ = []
        for number in numbers:
            names = {v.name for op in self._inlined_ops(self.samples.instance.ops[number]) for v in op.operands}
            first_used = {name for name in names if name in self._weights and name not in seen}
            seen |= first_used
            bytes_.append(float(sum(self._weights[name].tensor.bytes for name in first_used)))
        return bytes_

    def send_seconds(self, values: Sequence[Value]) -> float:
        """Return the seconds to send values of the entry for a microbatch from a stage to the next."""
        size = sum(self._part(self.samples.names[value.name], value).bytes for value in values)
        return collective_seconds(self.profile, Collective.SEND, (0, 1), (size, size)) if size else 0.0

    def _inlined_ops(self, target: int | Instance) -> Iterator[Op]:
        if isinstance(target, Instance):
            for inner in target.ops:
                yield from self._inlined_ops(inner)
        else:
            yield self.samples.classes.function.ops[target]

    def _seconds(self, op: Op) -> float:
        operands = [self._part(v.name, v) for v in op.operands]
        results = [self._part(v.name, v) for v in op.results]
        with_gradient = [v.name for v in op.operands if v.name in self._with_gradient]
        key = (op.name, id(op.attrs), *operands, *results)
        if key not in self._ops:
            self._ops[key] = op_seconds(self.profile, lookup(op.name, op.location), operands, op.attrs, results)
        has_samples = any(self.samples.dims(v.name, len(v.tensor.shape)) for v in (*op.operands, *op.results))
        share = 1.0 if has_samples else 1.0 / self.microbatches
        return share * self._ops[key] * (1 + len(with_gradient)) + sum(map(self._accumulation_seconds, with_gradient))

    def _accumulation_seconds(self, name: str) -> float:
        """Return the seconds to accumulate the gradient of a weight, at its first use."""
        if name not in self._weights or name in self._accumulated or self.microbatches == 1:
            return 0.0
        self._accumulated.add(name)
        traffic = 3 * self._weights[name].tensor.bytes
        return max(self.profile.dispatch, self.profile.overhead + traffic / self.profile.bandwidth)

    def _part(self, name: str, value: Value) -> TensorType:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self.samples.part(name, value.tensor.typical, self.share)
        return part
