"""Several updates in a step: each of its own parameters, by its own loss and optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from distir_relax.errors import DistIRError
from distir_relax.optimizers.groups import Composite
from distir_relax.optimizers.optimizer import Optimizer, Update


@dataclass(frozen=True)
class Updates(Composite):
    """The updates of a step, one after the other (`Update`): a list of them is the optimizer of `compile_training`.

    As in a loop of torch, what the model computes after a loss sees the parameters that the update by this loss has
    changed. Raises `DistIRError` for an empty list, and for something else in it.
    """

    sequence: tuple[Update, ...]

    def __post_init__(self) -> None:
        if not self.sequence or not all(isinstance(update, Update) for update in self.sequence):
            kinds = ", ".join(type(update).__name__ for update in self.sequence)
            raise DistIRError(
                f"expected dr.optim.Update objects, found {kinds or 'none'}", "optimizer",
                'such as dr.optim.Update("critic", "critic.*", dr.optim.Adam(2e-4))',
            )  # fmt: skip

    @property
    def updates(self) -> tuple[Update, ...]:
        """Return the updates in order."""
        return self.sequence

    @property
    def parts(self) -> Sequence[Optimizer]:
        """Return the optimizers of all updates."""
        return tuple(chain.from_iterable(update.optimizer.parts for update in self.sequence))

    def of(self, name: str) -> Optimizer:
        """Return the optimizer of a parameter."""
        return next(update.optimizer.of(name) for update in self.sequence if update.of(name))

    def check_parameters(self, names: Collection[str]) -> None:
        """Raise `DistIRError` unless each of the trained parameters `names` is in one update, and each pattern has one.

        A parameter in two updates would have the state of two optimizers.
        """
        for update in self.sequence:
            for pattern in update.patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise DistIRError(
                        f"no trained parameter matches {pattern!r}", f"the update of {update.loss!r}",
                        f"there are {', '.join(list(names)[:6])}",
                    )  # fmt: skip
        for name in names:
            losses = [update.loss for update in self.sequence if update.of(name)]
            if len(losses) != 1:
                found = " and ".join(map(repr, losses)) or "none"
                raise DistIRError(
                    f"expected each trained parameter in one update, found {name!r} in {found}", "optimizer",
                    "narrow the patterns" if losses else "add it to an update, or freeze it with requires_grad_(False)",
                )  # fmt: skip


def losses_of(optimizer: Optimizer | None) -> tuple[str, ...]:
    """Return the names of the losses of several updates, each once; empty for an optimizer of one loss."""
    return tuple(dict.fromkeys(u.loss for u in optimizer.updates)) if isinstance(optimizer, Updates) else ()
