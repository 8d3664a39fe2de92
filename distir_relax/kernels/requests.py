"""Steps of several requests: the rows of all of them in one tensor, and the sizes and states of each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
    states: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    sized: Sequence[torch.Tensor | None] = ()


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate along `dim`; one part is not copied."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def rows(requests: Sequence[Request]) -> Mapping[str, list[int]]:
    """Return the number of rows of each request, by the name of the size."""
    return {"new": [r.new for r in requests], "last": [r.last for r in requests]}
