"""The data of `distir train`: a user's function, found by name, that gives batches or a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from distir_relax.bundle import Manifest
from distir_relax.errors import ImportModelError
from distir_relax.runtime.training.batches import Data, DataSet, Samples, Stream
from distir_relax.support.user_function import call_function, find_function, users_code


def data_of(target: str) -> Callable[[Manifest, int], Data]:
    """The data that ``FILE.py:FUNCTION`` gives, for a program and a seed.

    FUNCTION returns a data set (``__len__`` and ``__getitem__`` of one sample), or an iterable of batches; where it has
    the parameters `start` and `seed` it is given the number of the first step, and the seed. Raises `ImportModelError`
    where it is missing, raises, or returns something else.
    """
    function = find_function(target)
    takes_start = "start" in inspect.signature(function).parameters

    def given(manifest: Manifest, seed: int) -> Data:
        if takes_start:
            return Stream(manifest, lambda step: _iterable(_call(function, target, seed, step), target))
        found = _call(function, target, seed)
        if hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, (list, tuple, dict)):
            return Samples(manifest, _Guarded(found, target), seed)
        return Stream(manifest, _Again(found, lambda: _call(function, target, seed), target).begin)

    return given


def _call(function: Callable[..., Any], target: str, seed: int, start: int | None = None) -> Any:
    return call_function(function, target, {"seed": seed, "start": start})


class _Again:
    """The batches of a function that knows no `start`: called anew for each epoch, those before the first left out."""

    def __init__(self, first: Any, call: Callable[[], Any], target: str) -> None:
        self._first, self._call, self._target = first, call, target
        self._begun = False

    def begin(self, step: int) -> Iterable[Any]:
        """The batches from a step on, or those of the next epoch."""
        if self._begun:
            return _iterable(self._call(), self._target)
        self._begun = True
        return self._skipping(step)

    def _skipping(self, count: int) -> Iterator[Any]:
        source = self._first
        while True:
            items = _iterable(source, self._target)
            passed = sum(1 for _ in islice(items, count))
            count -= passed
            if not count or not passed:
                return items
            source = self._call()


class _Guarded:
    """A data set whose errors are told with the user's own frames."""

    def __init__(self, samples: DataSet, target: str) -> None:
        self._samples, self._file = samples, target.rpartition(":")[0]

    def __len__(self) -> int:
        return int(users_code(lambda: len(self._samples), self._file, "was asked for its length"))

    def __getitem__(self, index: int) -> Any:
        return users_code(lambda: self._samples[index], self._file, f"was asked for sample {index}")


_END = object()


def _iterable(found: Any, target: str) -> Iterator[Any]:
    """The items of an iterable, whose errors are told with the user's own frames."""
    file = target.rpartition(":")[0]
    if not hasattr(found, "__iter__") or isinstance(found, dict):
        raise ImportModelError(
            f"expected batches or a data set, found {type(found).__name__}", target,
            "return an iterable of (inputs, targets), or a data set of single samples")  # fmt: skip

    def items() -> Iterator[Any]:
        source = users_code(lambda: iter(found), file, "was iterated over")
        while True:
            item = users_code(lambda: next(source, _END), file, "was asked for a batch")
            if item is _END:
                return
            yield item

    return items()
