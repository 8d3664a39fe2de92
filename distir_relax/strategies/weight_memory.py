"""What a device keeps of the weights that it works with: in training gradients and the optimizer's state, too."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes for each byte of weights in use: of the `weights` themselves, `gradients`, the optimizer's `state`."""

    weights: float = 1.0
    gradients: float = 0.0
    state: float = 0.0

    @staticmethod
    def of(strategy: Strategy, states: int | None) -> Kept:
        """That of a strategy, with an optimizer that keeps so many tensors of each weight; None: nothing is trained.

        ZeRO divides them by the data-parallel ranks: the state, then gradients, then weights.
        """
        if states is None:
            return Kept()
        part = 1.0 / strategy.data
        return Kept(
            part if strategy.zero > 2 else 1.0,
            part if strategy.zero > 1 else 1.0,
            states * (part if strategy.zero else 1.0),
        )

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.gradients + self.state
