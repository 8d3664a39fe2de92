"""What is known of a strategy before it is compiled: whether weights alone fit, whether all devices get a part."""

from __future__ import annotations

from dataclasses import dataclass, field

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.strategies.factor_costs import Classes, classes_of
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.tensor_parallel import tensor_classes

TOO_LARGE = "weights, gradients and the optimizer's state alone do not fit"
TOO_FINE = "the weights of a layer cannot be cut into as many parts as there are tensor ranks"
RULED_OUT = (TOO_LARGE, TOO_FINE)
"""Why candidates are not compiled at all."""


@dataclass
class Least:
    """Says of strategies for a model that they cannot be: too large for the machine, or cut too fine."""

    source: Source
    profile: Profile
    _classes: Classes = field(init=False)
    _weights: float = field(init=False)
    _trained: float = field(init=False)
    _fewest: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, training = self.source.imported.module, self.source.training
        self._classes = classes_of(module)
        weights = {i.value.name: i.value.tensor for i in module.main.inputs if i.role == "parameter"}
        names = set() if training is None else set(weights if training.trained is None else training.trained)
        wide = training is not None and training.masters

        def size(name: str) -> float:
            kind = weights[name]
            return kind.elements * 4.0 if wide and kind.bytes < 4 * kind.elements else float(kind.bytes)

        self._weights = sum(map(size, weights))
        self._trained = sum(size(name) for name in weights if name in names)

    def bytes(self, strategy: Strategy) -> float:
        """What the device with most keeps, at least, while a second microbatch is worked on, or between two steps.

        Weights, with ZeRO their parts; with several microbatches the whole ones in use, and sums of gradients, both of
        two bytes where weights are kept in float32 beside those; the optimizer's state.
        """
        training, part = self.source.training, 1.0 / strategy.data
        found = self._weights * (part if strategy.zero else 1.0)
        if strategy.zero in (1, 2) and strategy.microbatches > 1 and strategy.data > 1:
            found += self._weights * (0.5 if training is not None and training.masters else 1.0 - part)
        if training is not None:
            found += self._trained * len(training.optimizer.keeps) * (part if strategy.zero else 1.0)
            if strategy.microbatches > 1:
                narrow = 0.5 if training.masters else 1.0
                found += self._trained * narrow * (part if strategy.zero > 1 else 1.0)
        return found / (strategy.tensor * strategy.pipeline)

    def refusal(self, strategy: Strategy) -> str:
        """Why a strategy need not be tried; nothing where it may be, and where placements are looked for."""
        if strategy.placements == "auto":
            return ""
        if self._is_too_fine(strategy.tensor):
            return TOO_FINE
        most = max(memory for _, memory in self.profile.kinds(strategy.devices))
        return TOO_LARGE if self.bytes(strategy) > most else ""

    def _is_too_fine(self, tensor: int) -> bool:
        """Whether a class that is split over the tensor axis has fewer units than that has ranks."""
        if tensor not in self._fewest:
            taken = tensor_classes(self._classes, tensor, frozenset(), self.source.is_training) if tensor > 1 else ()
            self._fewest[tensor] = min((self._classes.size(owner) for owner in taken), default=tensor)
        return self._fewest[tensor] < tensor
