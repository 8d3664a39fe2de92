"""Groups of parameters, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder
from distir_relax.optimizers.optimizer import Numbers, Optimizer
from distir_relax.support.learning_rate import LearningRate


class Composite(Optimizer):
    """An optimizer of several `parts`, each with a learning rate, weight decay and state of its own."""

    @property
    def lr(self) -> LearningRate:  # type: ignore[override]
        """The learning rate of the first part."""
        return self.parts[0].lr

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the state of the part that has most."""
        return max((part.keeps for part in self.parts), key=len)

    def states(self, parameter: TensorType) -> dict[str, TensorType]:
        """Raise `TypeError`: each part has its own."""
        raise TypeError("ask the optimizer of a parameter")

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """Raise `TypeError`: each part has its own."""
        raise TypeError("ask the optimizer of a parameter")


@dataclass(frozen=True)
class Groups(Composite):
    """Optimizers by patterns of parameter names: ``Groups(AdamW(1e-3), {"*.embed.*": SGD(0.1)})``.

    A parameter is updated by the first pattern that matches its name, or by `default`. Each optimizer has its own
    learning rate, weight decay and state. Raises `DistIRError` for values that are no optimizers, and for groups in
    groups.
    """

    default: Optimizer
    groups: Mapping[str, Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern, optimizer in {"": self.default, **self.groups}.items():
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Groups):
                where = f"the group {pattern!r}" if pattern else "Groups"
                raise DistIRError(
                    f"expected an optimizer such as dr.optim.AdamW(lr=1e-3), found {type(optimizer).__name__}", where
                )

    @property
    def parts(self) -> Sequence[Optimizer]:
        """Return the default and the optimizers of all groups."""
        return (self.default, *self.groups.values())

    def of(self, name: str) -> Optimizer:
        """Return the optimizer of a parameter."""
        return next((part for pattern, part in self.groups.items() if fnmatchcase(name, pattern)), self.default)

    def unused(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the patterns of groups that match none of these parameters."""
        return tuple(pattern for pattern in self.groups if not any(fnmatchcase(name, pattern) for name in names))
