"""Lower bounds that rule out a strategy before compilation: memory of the weights, units per tensor rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from distir_relax.compiler.pass_manager import run_passes
from distir_relax.compiler.pass_pipeline import weight_memory
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.pipeline_stages import CutStages, count_places
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.tensor_parallel import tensor_classes

TOO_LARGE = "weights, gradients and the optimizer's state alone do not fit"
TOO_FINE = "the weights of a layer cannot be cut into as many parts as there are tensor ranks"
TOO_MANY_STAGES = "the model cannot be cut into as many stages"
KEEPS_TOO_MUCH = "weights, the optimizer's state and the activations of microbatches in flight do not fit"
TOO_SLOW = "the least time of its step is above that of the best"
RULED_OUT = (TOO_LARGE, TOO_FINE, TOO_MANY_STAGES, KEEPS_TOO_MUCH, TOO_SLOW)
"""The reasons why candidates are not compiled."""


class WeightBytes(NamedTuple):
    """Bytes of weights, or of their shards with ZeRO, with the optimizer's state (`stored`); and with several
    microbatches those `gathered` for use, of two bytes if they are used in 16 bits, and of accumulated `gradients`, of
    two bytes if weights have float32 master copies."""

    stored: float
    gathered: float
    gradients: float

    def times(self, factor: float) -> WeightBytes:
        """Return the bytes of so many times the weights."""
        return WeightBytes(*(factor * size for size in self))

    def by_one(self, chunks: int) -> float:
        """Return the least bytes on a rank of so many stages while the largest of them accumulates gradients.

        Each other stage either has yet to use its weights, or has gradients too.
        """
        return self.stored + min(self[1:]) + max(self[1:]) / chunks

    def least(self, chunks: int) -> float:
        """Return the least of the most bytes on a rank of so many stages, over a step."""
        return max(self.stored + max(self[1:]), self.by_one(chunks))


@dataclass
class LowerBounds:
    """Lower bounds of strategies for a model on a machine."""

    source: Source
    profile: Profile
    _classes: Classes = field(init=False)
    _weights: float = field(init=False)
    _trained: float = field(init=False)
    _narrows: bool = field(init=False)
    """Whether weights are used in 16 bits."""
    _min_units: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, training = self.source.imported.module, self.source.training
        self._classes = classes_of(module)
        weights = {i.value.name: i.value.tensor for i in module.main.inputs if i.role == "parameter"}
        names = set() if training is None else set(weights if training.trained is None else training.trained)
        has_masters = training is not None and training.masters
        self._narrows = has_masters or any("float16" in v.tensor.dtype for op in module.main.ops for v in op.results)

        def size(name: str) -> float:
            tensor = weights[name]
            return tensor.elements * 4.0 if has_masters and tensor.bytes < 4 * tensor.elements else float(tensor.bytes)

        self._weights = sum(map(size, weights))
        self._trained = sum(size(name) for name in weights if name in names)

    def bytes(self, strategy: Strategy) -> float:
        """Return the least memory of the largest device, while a second microbatch runs or between two steps."""
        return self.weights(strategy).least(strategy.chunks) / strategy.pipeline

    def weights(self, strategy: Strategy) -> WeightBytes:
        """Return the bytes on a tensor rank, of all stages."""
        training = self.source.training
        memory = weight_memory(strategy, training)
        stored = self._weights * memory.stored + self._trained * memory.state
        gathered = gradients = 0.0
        if strategy.microbatches > 1:
            gathered = self._weights * (0.5 if self._narrows else memory.gathered) if memory.gathered else 0.0
            gradients = self._trained * memory.gradients * (0.5 if training is not None and training.masters else 1.0)
        return WeightBytes(stored, gathered, gradients).times(1.0 / strategy.tensor)

    def refusal(self, strategy: Strategy) -> str:
        """Return why a strategy need not be tried; empty if it may be, and with autosharding."""
        if strategy.placements == "auto":
            return ""
        if self._is_too_fine(strategy.tensor):
            return TOO_FINE
        if strategy.pipeline > 1 and strategy.microbatches > 1 and strategy.pipeline * strategy.chunks > self._places:
            return TOO_MANY_STAGES
        limit = max(memory for _, memory in self.profile.device_specs(strategy.devices))
        return TOO_LARGE if self.bytes(strategy) > limit else ""

    @cached_property
    def _places(self) -> float:
        """The most stages that the model can be cut into, with several microbatches; infinity if that is unknown."""
        source = self.source.with_strategy(Strategy(1, 1, 2, 2))
        try:
            passes = source.distributed_passes(repeated=True)
            cut = next((i for i, step in enumerate(passes) if isinstance(step, CutStages)), None)
            return math.inf if cut is None else count_places(run_passes(source.imported.module, passes[:cut], []))
        except DistIRError:
            # Compilation of a candidate gives the reason.
            return math.inf

    def _is_too_fine(self, tensor: int) -> bool:
        """Return whether a class that is split over the tensor axis has fewer units than ranks."""
        if tensor not in self._min_units:
            owners = tensor_classes(self._classes, tensor, frozenset(), self.source.is_training) if tensor > 1 else ()
            self._min_units[tensor] = min((self._classes.size(owner) for owner in owners), default=tensor)
        return self._min_units[tensor] < tensor
