"""Rejection of models that draw from generators of Python or NumPy: a program would repeat the example's numbers.

Draws from torch's own generator are ops of the exported graph, and draws from others leave a trace in their generator
alone. Generators are the global ones, those in attributes of the model's modules, and the global variables of the files
in which the model's classes are, and of the script.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_of_frames
from distir_relax.frontends.torch.module_state import call_results
from distir_relax.frontends.torch.transformers_options import drawn_numbers_hint

if TYPE_CHECKING:
    import torch


@contextmanager
def reject_drawn_numbers(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise `ImportModelError` at the end of the context, the export of a call of `model`, if a generator advanced.

    The error names the line of a second call, which is run step by step. If that one draws nothing, another thread did.
    Generators have their old state afterwards. Those of other objects, such as those in closures, are not noticed.
    """
    generators = dict(_generators(model))
    before = {name: read() for name, (read, _) in generators.items()}
    try:
        yield
        for name, (read, _) in generators.items():
            if read() == before[name] or (place := _drawing_place(read, model, args, kwargs)) is None:
                continue
            hint = "draw with torch (torch.rand, F.dropout), or outside of the model and pass the number as an input"
            if "transformers" in Path(place[0]).parts:
                hint = drawn_numbers_hint(model)
            raise ImportModelError(
                f"the model, its loss or a metric draws numbers from {name}, which a program would repeat",
                location_of_frames([place]), hint,
            )  # fmt: skip
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
    places = [(path, vars(module)) for path, module in model.named_modules()]
    files = dict.fromkeys(["__main__", *(type(module).__module__ for module in model.modules())])
    places += [(file, vars(sys.modules[file])) for file in files if file in sys.modules]
    for path, values in places:
        for name, value in list(values.items()):
            where = f"the generator {path}.{name}" if path else f"the generator {name}"
            if isinstance(value, random.Random):
                yield where, (value.getstate, value.setstate)
            elif numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
                yield where, _of_numpy(getattr(value, "bit_generator", None) or value._bit_generator)


def _of_numpy(bits: Any) -> _Generator:
    """Return the functions of a bit generator, whose states are dicts with arrays: as bytes they can be compared."""
    return lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state))


_Place = tuple[str, int]
"""A file, and a line in it."""


def _drawing_place(
    read: Callable[[], _State], model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Place | None:
    """Return the place in the user's code at which a call of the model changes a state.

    It is None if the call does not change it, and ("", 0) for a model that cannot be called.
    """
    first, place = read(), ("", 0)
    places: list[_Place] = []

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal place
        if places or not location_of_frames([_place(frame)]):
            return None
        if read() != first:
            places.append(place)
        # After a call the line of the caller goes on.
        place = _users_place(frame.f_back) if event == "return" else _place(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        returned = False
        with suppress(Exception):  # The model raises whatever it does in a second call.
            returned = bool(call_results(model, args, kwargs))
    finally:
        sys.settrace(before)
    return places[0] if places else None if returned else ("", 0)


def _place(frame: FrameType) -> _Place:
    return frame.f_code.co_filename, frame.f_lineno


def _users_place(frame: FrameType | None) -> _Place:
    """Return the place of the innermost frame of the user's code in a stack; ("", 0) without any."""
    while frame is not None and not location_of_frames([_place(frame)]):
        frame = frame.f_back
    return ("", 0) if frame is None else _place(frame)
