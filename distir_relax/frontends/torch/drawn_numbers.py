"""Rejection of models that draw from generators of Python or NumPy: a program would repeat the example's numbers.

Draws from torch's own generator are ops of the exported graph, and draws from others leave a trace in their generator
alone. Generators are the global ones and those in attributes of the model's modules.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_of_frames
from distir_relax.frontends.torch.module_state import call_results

if TYPE_CHECKING:
    import torch


@contextmanager
def reject_drawn_numbers(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise `ImportModelError` at the end of the context, the export of a call of `model`, if a generator advanced.

    The error names the line of a second call, which is run step by step. If that one draws nothing, another thread did.
    Generators have their old state afterwards.
    """
    generators = dict(_generators(model))
    before = {name: read() for name, (read, _) in generators.items()}
    try:
        yield
        for name, (read, _) in generators.items():
            if read() == before[name] or (line := _drawing_line(read, model, args, kwargs)) is None:
                continue
            raise ImportModelError(
                f"the model draws numbers from {name} in its forward, which a program would repeat",
                line,
                "draw with torch (torch.rand, F.dropout), or outside of the model and pass the number as an input",
            )
    finally:
        for name, (read, write) in generators.items():
            if read() != before[name]:
                write(before[name])


_State = Any
_Generator = tuple[Callable[[], _State], Callable[[_State], None]]


def _generators(model: torch.nn.Module) -> Iterator[tuple[str, _Generator]]:
    """Yield generators by name, each as functions that read and write its state."""
    yield "Python's random", (random.getstate, random.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", _of_numpy(numpy.random.get_bit_generator())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            where = f"the generator {path}.{name}" if path else f"the generator {name}"
            if isinstance(value, random.Random):
                yield where, (value.getstate, value.setstate)
            elif numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
                yield where, _of_numpy(getattr(value, "bit_generator", None) or value._bit_generator)


def _of_numpy(bits: Any) -> _Generator:
    """Return the functions of a bit generator, whose states are dicts with arrays: as bytes they can be compared."""
    return lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state))


def _drawing_line(
    read: Callable[[], _State], model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Return the line of the user's code at which a call of the model changes a state.

    It is None if the call does not change it, and "" for a model that cannot be called.
    """
    last, line = read(), ("", 0)
    lines: list[str] = []

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal last, line
        place = frame.f_code.co_filename, frame.f_lineno
        if lines or not location_of_frames([place]):
            return None
        if (now := read()) != last:
            last = now
            lines.append(location_of_frames([line]))
        line = place
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        returned = False
        with suppress(Exception):  # The model raises whatever it does in a second call.
            returned = bool(call_results(model, args, kwargs))
    finally:
        sys.settrace(before)
    return lines[0] if lines else None if returned else ""
