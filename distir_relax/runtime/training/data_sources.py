"""Data of a training run from a user's object: batches, a data loader, a data set, or a function that returns one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import START, DataPosition
from distir_relax.errors import RunError
from distir_relax.layout import is_symbolic
from distir_relax.runtime.training.batches import Data, Samples, Stream, batches_of, data_inputs, samples_in, samples_of
from distir_relax.runtime.training.data_loader import LoaderEpochs, check_loader, is_loader
from distir_relax.runtime.training.executor import Batch
from distir_relax.runtime.training.skip_batches import skip_batches

_Result = TypeVar("_Result")
Guard = Callable[[Callable[[], Any], str], Any]
"""Call of a user's code; the text says for what, for errors: ``was iterated over``."""


def call_directly(action: Callable[[], _Result], moment: str) -> _Result:
    """Call a user's code, whose exceptions reach the caller: a `Guard`."""
    return action()


def open_data(
    data: Any, manifest: Manifest, seed: int, start: DataPosition = START, guard: Guard = call_directly
) -> Data:
    """Return the batches of a user's object from a position on.

    `data` is an iterable of batches, a `torch.utils.data.DataLoader`, a data set of single samples (``__len__`` and
    ``__getitem__``), or a function that returns one of them (`open_function`). Raises RunError for other objects.
    """
    if callable(data) and not _is_source(data):
        parameters = inspect.signature(data).parameters

        def call(start: int | None) -> Any:
            offered = {"seed": seed, "start": start}
            return data(**{name: value for name, value in offered.items() if name in parameters})

        return open_function(call, "start" in parameters, manifest, seed, start, guard)
    return _open(data, lambda: data, manifest, seed, start, guard)


def open_function(
    call: Callable[[int | None], Any], takes_start: bool, manifest: Manifest, seed: int,
    start: DataPosition = START, guard: Guard = call_directly,
) -> Data:  # fmt: skip
    """Return the batches of a function of the number of a run's first batch, if it `takes_start`, else of None.

    A function of the first batch is called again, from there, when its batches end; another one when it has returned an
    iterator that ends. Raises RunError for an unusable result, and if no batch begins after the samples so far.
    """
    if not takes_start:
        return _open(call(None), lambda: call(None), manifest, seed, start, guard)
    rows = samples_of(manifest)

    def begin(at: DataPosition) -> tuple[Iterator[Any], DataPosition]:
        batches, rest = divmod(at.batches * (at.rows or rows), rows)
        if rest:
            raise RunError(
                f"expected batches of {rows} with the samples of the {at.batches} of {at.rows} before the checkpoint, "
                f"found {batches} and {rest} samples", "the data",
                f"resume with batches of {at.rows}, or from a checkpoint after a multiple of {rows} samples",
            )  # fmt: skip
        return _iterate(call(batches), guard), DataPosition(batches, rows=rows)

    return Stream(manifest, begin, start)


def open_evaluation(data: Any, manifest: Manifest, guard: Guard = call_directly) -> Callable[[], Iterator[Batch]]:
    """Return a function that yields the batches of a user's object once, in the same order at each call.

    `data` is as for `open_data`, or a function without parameters that returns such an object. It is called again after
    it has returned an iterator. `manifest` is that of the evaluation. Raises RunError for
    an object without a batch, at once.

    A program of one batch size leaves out the incomplete last batch of a data set, with a warning.
    """
    is_function = callable(data) and not _is_source(data)
    objects: list[Any] = [data()] if is_function else [data]
    if is_function and isinstance(objects[0], Iterator):
        first = guard(lambda: list(islice(objects[0], 1)), "was iterated over")
        objects[0] = chain(first, objects[0]) if first else ()
    if _is_empty(objects[0], manifest):
        raise RunError("expected batches to evaluate, found none", "the evaluation data")
    is_read = False

    def batches() -> Iterator[Batch]:
        nonlocal is_read
        if is_read and is_function and isinstance(objects[0], Iterator):
            objects[:] = [data()]
        source, is_read = objects[0], True
        if is_loader(source):
            check_loader(source, manifest)
            batches, _ = LoaderEpochs(source, 0, samples_of(manifest)).begin(START)
            yield from batches_of(manifest, _iterate(batches, guard))
        elif _has_samples(source):
            samples = Samples(manifest, _GuardedSamples(source, guard), None)
            if samples.dropped:
                warnings.warn(_dropped(samples.dropped, len(source)), stacklevel=2)
            yield from samples.epoch()
        else:
            yield from batches_of(manifest, _iterate(source, guard))

    return batches


def _is_empty(source: Any, manifest: Manifest) -> bool:
    """Return whether an object is known to have no batch."""
    if _has_samples(source):
        rows = next((tensor.shape[0] for tensor in data_inputs(manifest) if tensor.shape), 1)
        return len(source) < (1 if is_symbolic(rows) else samples_of(manifest))
    try:
        return not len(source)
    except TypeError:
        return False


def _dropped(count: int, samples: int) -> str:
    return (
        f"{count} of {samples} samples are not evaluated: the model takes batches of one size (give batches that have "
        "all samples, or a data set of a multiple of that size)"
    )


def _open(
    data: Any, again: Callable[[], Any], manifest: Manifest, seed: int, start: DataPosition, guard: Guard
) -> Data:
    if is_loader(data):
        check_loader(data, manifest)
        epochs = LoaderEpochs(data, seed, samples_of(manifest))

        def begin(at: DataPosition) -> tuple[Iterator[Any], DataPosition]:
            items, at = guard(lambda: epochs.begin(at), "was iterated over")
            return _iterate(items, guard), at

        return Stream(manifest, begin, start, epochs.batches_after, epochs.order)
    if _has_samples(data):
        return Samples(manifest, _GuardedSamples(data, guard), seed, start)
    count = len(data) if hasattr(data, "__len__") and not isinstance(data, dict) else None
    after = lambda at: None if count is None else count - at.place  # noqa: E731
    return Stream(manifest, _Epochs(data, again, guard, samples_of(manifest)).begin, start, after)


def _is_source(data: Any) -> bool:
    return hasattr(data, "__iter__") or hasattr(data, "__getitem__")


def _has_samples(data: Any) -> bool:
    """Return whether the items of an object are single samples."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (list, tuple, dict))


class _Epochs:
    """Batches of an iterable, which is iterated again for each epoch; batches before the first one are skipped.

    An iterator, which has one epoch, is replaced by the result of `again`.
    """

    def __init__(self, data: Any, again: Callable[[], Any], guard: Guard, rows: int) -> None:
        self._data, self._again, self._guard, self._rows = data, again, guard, rows
        self._begun = False

    def begin(self, at: DataPosition) -> tuple[Iterator[Any], DataPosition]:
        """Return the batches from a position on, or those of the next epoch, and the position."""
        if self._begun:
            return self._next_epoch(), at
        return skip_batches(at, self._rows, self._next_epoch, samples_in)

    def _next_epoch(self) -> Iterator[Any]:
        if self._begun and isinstance(self._data, Iterator):
            self._data = self._again()
        self._begun = True
        return _iterate(self._data, self._guard)


class _GuardedSamples:
    """A data set whose code is called by a guard."""

    def __init__(self, samples: Any, guard: Guard) -> None:
        self._samples, self._guard = samples, guard

    def __len__(self) -> int:
        return int(self._guard(lambda: len(self._samples), "was asked for its length"))

    def __getitem__(self, index: int) -> Any:
        return self._guard(lambda: self._samples[index], f"was asked for sample {index}")


_END = object()


def _iterate(data: Any, guard: Guard) -> Iterator[Any]:
    """Return an iterator over batches that calls the user's code by the guard."""
    if not hasattr(data, "__iter__") or isinstance(data, dict):
        raise RunError(
            f"expected batches or a data set, found {type(data).__name__}", "the data",
            "an iterable of (inputs, targets), a DataLoader, or a data set of single samples",
        )  # fmt: skip

    def items() -> Iterator[Any]:
        source = guard(lambda: iter(data), "was iterated over")
        while True:
            item = guard(lambda: next(source, _END), "was asked for a batch")
            if item is _END:
                return
            yield item

    return items()
