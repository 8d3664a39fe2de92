"""Steps of several requests: the rows of all of them in one tensor, and the sizes and states of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_MOST_RECORDED = 32
"""Maximum number of requests of a recorded step: in a larger one, Python between ops is a small part of the time."""


def are_recorded(count: int, lengths: Iterable[tuple[int, int]]) -> bool:
    """Return whether CPU backends record a step of `count` requests: each has one new token, and its logits alone.

    `lengths` are their numbers of new tokens and of the last of these with logits; equal requests may count once.
    """
    return count <= _MOST_RECORDED and all(pair == (1, 1) for pair in lengths)


class States(dict[str, "torch.Tensor"]):
    """The states of a request, by name. Kernels keep in `places` where growing ones are in memory, by their names."""

    def __init__(self, states: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        super().__init__(states)
        self.places: dict[str, bytes] = {}


@dataclass(slots=True)
class Request:
    """One request in a step: `new` tokens after `past` ones, with outputs for the `last` of them.

    `states` are its states by name, which the step replaces by their next values: those that grow are buffers with the
    `past` tokens first, and get the new ones after these. `sized` are the values of the program
    that depend on these sizes alone, None for a mask that is all true.
    """

    past: int
    new: int
    last: int
    states: States = field(default_factory=States)
    sized: Sequence[torch.Tensor | None] = ()


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate along `dim`; one part is not copied."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def rows(requests: Sequence[Request]) -> Mapping[str, list[int]]:
    """Return the number of rows of each request, by the name of the size."""
    return {"new": [r.new for r in requests], "last": [r.last for r in requests]}
