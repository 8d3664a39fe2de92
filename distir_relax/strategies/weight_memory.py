"""Memory of a device for its weights: in training with gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes for each byte of weights in use.

    Weights are `stored` between steps; the others are `gathered` for their use. `gradients` and `state` are those of
    the optimizer.
    """

    stored: float = 1.0
    gathered: float = 0.0
    gradients: float = 0.0
    state: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.stored + self.gathered + self.gradients + self.state
