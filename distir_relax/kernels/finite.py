"""Checks that results are numbers, for programs that were emitted with them: the first op that gives a NaN is named."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


class _Places(threading.local):
    """Where a rank's program is: the calls of functions that it is in, and the first op whose result was infinite."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.infinite = ""


_places = _Places()


def begin(inputs: Sequence[tuple[str, torch.Tensor]], weights: dict[str, Any]) -> None:
    """Begin a step. Raises RunError if an input or a weight has a NaN: no op is to blame then."""
    import torch

    _places.calls, _places.infinite = [], ""
    named = [("the input", name, value) for name, value in inputs]
    named += [("the weight", name, value) for name, value in weights.items()]
    for what, name, value in named:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            raise RunError(f"{what} {name!r} has a NaN before the step")


def enter(place: str) -> None:
    """Note that the program calls a function for a place in the model."""
    _places.calls.append(place)


def leave() -> None:
    """Note that the call has ended."""
    _places.calls.pop()


def check(comm: Any, what: str, *results: torch.Tensor) -> None:
    """Raise RunError if a result of the op `what`, as text with its place in the model, has a NaN."""
    for result in results:
        if not result.is_floating_point() or bool(result.isfinite().all()):
            continue
        place = " in ".join([what, *reversed(_places.calls)])
        if bool(result.isnan().any()):
            count, doing = int(result.isnan().sum()), comm.progress.doing
            problem = f"{count:,} of {result.numel():,} elements of a result are NaN"
            hint = f"the first infinite value was a result of {_places.infinite}" if _places.infinite else ""
            raise RunError(f"{problem}, {doing}" if doing else problem, place, hint)
        _places.infinite = _places.infinite or place
