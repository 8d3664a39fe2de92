"""Recording of values while a rank's program runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Recording(threading.local):
    """What the program of this thread records: the keys of wanted values with their names, and their tensors."""

    def __init__(self) -> None:
        self.wanted: Mapping[str, str] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []


_recording = _Recording()


def start(wanted: Mapping[str, str]) -> None:
    """Begin to record in this thread: the values whose keys are `wanted`, under the names that it maps them to."""
    _recording.wanted, _recording.values, _recording.calls = wanted, {}, []


def finish() -> dict[str, torch.Tensor]:
    """Stop, and return the values by name, on the CPU."""
    values = _recording.values
    start({})
    return values


def enter(call: str) -> None:
    """Note that the program calls a function and assigns its first result to the variable `call`."""
    _recording.calls.append(call)


def leave() -> None:
    """Note that the call has ended."""
    _recording.calls.pop()


def record(**values: Any) -> None:
    """Copy the values that are wanted; of one that is assigned again, the last."""
    import torch

    for variable, value in values.items():
        name = _recording.wanted.get(".".join([*_recording.calls, variable]))
        if name is not None and isinstance(value, torch.Tensor):
            # Its memory may be used for other values.
            _recording.values[name] = value.detach().clone().cpu()
