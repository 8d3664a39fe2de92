"""Shrinking of inputs: delta debugging over their elements, as long as a difference shows.

The elements of an input are set to zero: all of whole tensors, then along each dim, then one by one. The rest become 1,
if that is possible. The result is minimal in the sense of Zeller and Hildebrandt, Simplifying and Isolating
Failure-Inducing Input, 2002: no remaining element can be zero by itself. Of equal choices the first elements stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Tensors = dict[str, "torch.Tensor"]


class TimeIsOver(Exception):
    """Raised by `shows` to end the shrinking."""


def minimal(items: Sequence[T], shows: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a subset of `items` that still `shows`, of which no item can be left out; the first items are preferred.

    `shows` holds for all items.
    """
    kept, parts = list(items), 2
    if kept and shows([]):
        return []
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        alone = next((chunk for chunk in chunks if len(chunk) < len(kept) and shows(chunk)), None)
        if alone is not None:
            kept, parts = alone, 2
            continue
        # Later chunks are left out first.
        rests = ([item for other in chunks if other is not chunk for item in other] for chunk in reversed(chunks))
        rest = next((rest for rest in rests if len(chunks) > 2 and shows(rest)), None)
        if rest is not None:
            kept, parts = rest, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


@dataclass
class Shrinker:
    """Shrinks inputs for which `shows` holds; `tensors` are the smallest ones so far."""

    tensors: Tensors
    shows: Callable[[Tensors], bool]

    def shrink(self) -> None:
        """Make `tensors` the smallest inputs. Raises whatever `shows` does."""
        is_changed = True
        # Each change makes an element zero, or its value an earlier one of a list.
        while is_changed:
            before = self.tensors
            self._drop_tensors()
            for name in self._nonzero():
                self._drop_slices(name)
            for name in self._nonzero():
                self._drop_elements(name)
            self._simplify()
            is_changed = any(bool((x != before[name]).any()) for name, x in self.tensors.items())

    def _nonzero(self) -> list[str]:
        return [name for name, x in self.tensors.items() if bool(x.any())]

    def _try(self, changed: Tensors) -> bool:
        candidate = {**self.tensors, **changed}
        if not self.shows(candidate):
            return False
        self.tensors = candidate
        return True

    def _drop_tensors(self) -> None:
        import torch

        names = self._nonzero()
        whole = dict(self.tensors)

        def shows(kept: Sequence[str]) -> bool:
            return self._try({name: whole[name] if name in kept else torch.zeros_like(whole[name]) for name in names})

        minimal(names, shows)

    def _drop_slices(self, name: str) -> None:
        """Keep the parts along each dim that are needed."""
        import torch

        for dim in range(self.tensors[name].dim()):
            whole = self.tensors[name]
            others = [d for d in range(whole.dim()) if d != dim]
            used = (whole != 0).sum(others) > 0 if others else whole != 0
            positions = torch.nonzero(used).flatten().tolist()

            def shows(kept: Sequence[int], whole: torch.Tensor = whole, dim: int = dim) -> bool:
                part = torch.zeros_like(whole)
                index = torch.tensor(kept, dtype=torch.int64)
                return self._try({name: part.index_copy_(dim, index, whole.index_select(dim, index))})

            if len(positions) > 1:
                minimal(positions, shows)

    def _drop_elements(self, name: str) -> None:
        import torch

        whole = self.tensors[name]
        positions = torch.nonzero(whole.flatten()).flatten().tolist()

        def shows(kept: Sequence[int]) -> bool:
            part = torch.zeros_like(whole)
            part.view(-1)[list(kept)] = whole.view(-1)[list(kept)]
            return self._try({name: part})

        minimal(positions, shows)

    def _simplify(self) -> None:
        """Make elements 1: all at once, else those of a tensor, else one by one; else whole numbers."""
        ones = {name: (x != 0).to(x.dtype) for name, x in self.tensors.items()}
        if self._try(ones):
            return
        for name in self._nonzero():
            x = self.tensors[name]
            if self._try({name: (x != 0).to(x.dtype)}):
                continue
            for position in (x.flatten() != 0).nonzero().flatten().tolist():
                self._simplify_element(name, position)

    def _simplify_element(self, name: str, position: int) -> None:
        x = self.tensors[name]
        value = x.view(-1)[position].item()
        for simpler in (1, -1, 2, -2, 3, round(value)):
            if simpler == value:
                return
            changed = x.clone()
            changed.view(-1)[position] = simpler
            if simpler != 0 and bool((changed != x).any()) and self._try({name: changed}):
                return
