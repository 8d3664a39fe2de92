"""Training data of `distir train`: a user's function that returns batches or a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from distir_relax.bundle import Manifest
from distir_relax.errors import ImportModelError
from distir_relax.runtime.training.batches import Data, DataSet, Samples, Stream
from distir_relax.support.user_function import call_function, find_function, users_code


def load_data(target: str) -> Callable[[Manifest, int], Data]:
    """Return a function from a program's manifest and a seed to the data of ``FILE.py:FUNCTION``.

    FUNCTION returns a data set (``__len__`` and ``__getitem__`` of one sample), or an iterable of batches. If it has
    the parameters `start` and `seed`, it receives the number of the first step, and the seed. Raises `ImportModelError`
    if it is missing, raises, or returns something else.
    """
    function = find_function(target)
    takes_start = "start" in inspect.signature(function).parameters

    def open_data(manifest: Manifest, seed: int) -> Data:
        if takes_start:
            return Stream(manifest, lambda step: _iterable(_call(function, target, seed, step), target))
        data = _call(function, target, seed)
        if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (list, tuple, dict)):
            return Samples(manifest, _UserDataSet(data, target), seed)
        return Stream(manifest, _Epochs(data, lambda: _call(function, target, seed), target).begin)

    return open_data


def _call(function: Callable[..., Any], target: str, seed: int, start: int | None = None) -> Any:
    return call_function(function, target, {"seed": seed, "start": start})


class _Epochs:
    """Batches of a function without `start`: called once per epoch; batches before the first step are skipped."""

    def __init__(self, first: Any, call: Callable[[], Any], target: str) -> None:
        self._first, self._call, self._target = first, call, target
        self._begun = False

    def begin(self, step: int) -> Iterable[Any]:
        """Return the batches from a step on, or those of the next epoch."""
        if self._begun:
            return _iterable(self._call(), self._target)
        self._begun = True
        return self._skipping(step)

    def _skipping(self, count: int) -> Iterator[Any]:
        source = self._first
        while True:
            items = _iterable(source, self._target)
            skipped = sum(1 for _ in islice(items, count))
            count -= skipped
            if not count or not skipped:
                return items
            source = self._call()


class _UserDataSet:
    """A data set whose errors show the user's own frames."""

    def __init__(self, samples: DataSet, target: str) -> None:
        self._samples, self._file = samples, target.rpartition(":")[0]

    def __len__(self) -> int:
        return int(users_code(lambda: len(self._samples), self._file, "was asked for its length"))

    def __getitem__(self, index: int) -> Any:
        return users_code(lambda: self._samples[index], self._file, f"was asked for sample {index}")


_END = object()


def _iterable(result: Any, target: str) -> Iterator[Any]:
    """Return an iterator whose errors show the user's own frames."""
    file = target.rpartition(":")[0]
    if not hasattr(result, "__iter__") or isinstance(result, dict):
        raise ImportModelError(
            f"expected batches or a data set, found {type(result).__name__}", target,
            "return an iterable of (inputs, targets), or a data set of single samples")  # fmt: skip

    def items() -> Iterator[Any]:
        source = users_code(lambda: iter(result), file, "was iterated over")
        while True:
            item = users_code(lambda: next(source, _END), file, "was asked for a batch")
            if item is _END:
                return
            yield item

    return items()
