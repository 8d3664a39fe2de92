"""Memory of a device for its weights: in training with gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes for each byte of weights in use: of the `weights` themselves, `gradients`, the optimizer's `state`."""

    weights: float = 1.0
    gradients: float = 0.0
    state: float = 0.0

    @staticmethod
    def of(strategy: Strategy, states: int | None) -> WeightMemory:
        """Return the memory with an optimizer of `states` tensors per weight; None if nothing is trained.

        ZeRO divides them by the data-parallel ranks: the state, then gradients, then weights.
        """
        if states is None:
            return WeightMemory()
        part = 1.0 / strategy.data
        return WeightMemory(
            part if strategy.zero > 2 else 1.0,
            part if strategy.zero > 1 else 1.0,
            states * (part if strategy.zero else 1.0),
        )

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.weights + self.gradients + self.state
