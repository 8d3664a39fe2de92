"""Order and number of the batches of an epoch: in order, grouped by length, or the first ones alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.data_loader import is_loader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_GROUPS = 50
"""Batches whose samples are sorted by length together, or a quarter of an epoch, if that has fewer."""


def arrange(data: Any, limit: float | None = None, in_order: bool = False, grouped_by: str = "") -> Any:
    """Return data whose epochs have another order, or the first `limit` batches alone.

    `data` is a `DataLoader`, or an iterable of batches, whose order stays. `limit` is a number of batches, or, as a
    float, a part of all. With `grouped_by`, samples of similar length make a batch: their length is that of the value
    `grouped_by`, or the value itself if that is a number, or without one that of ``input_ids``. Raises RunError for a
    limit without batches, and for data that are not of these kinds.
    """
    if limit is None and not in_order and not grouped_by:
        return data
    if is_loader(data):
        data = _sampled(data, in_order, grouped_by) if in_order or grouped_by else data
        return data if limit is None else _limited_loader(data, _count(limit, data))
    is_sequence = isinstance(data, (list, tuple))
    if grouped_by or not hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and not is_sequence):
        raise RunError(
            f"expected a DataLoader, whose epochs can be limited and ordered, found {type(data).__name__}", "the data"
        )
    return data if limit is None else _FirstItems(data, _count(limit, data))


def _count(limit: float, data: Any) -> int:
    if isinstance(limit, float) and not hasattr(data, "__len__"):
        raise RunError("expected a number of batches, found a part of data without a length", "limit_batches")
    count = int(limit * len(data)) if isinstance(limit, float) else limit
    if count < 1:
        raise RunError(f"expected a limit of at least one batch, found {limit}", "limit_batches")
    return count


def _limited_loader(loader: DataLoader[Any], count: int) -> Any:
    if _is_iterable(loader):
        return _FirstItems(loader, count)
    if loader.batch_sampler is None:
        return _copy(loader, sampler=_FirstItems(loader.sampler, count))
    return _copy(loader, batch_sampler=_FirstItems(loader.batch_sampler, count))


def _sampled(loader: DataLoader[Any], in_order: bool, grouped_by: str) -> DataLoader[Any]:
    from torch.utils.data import SequentialSampler

    if _is_iterable(loader) and not grouped_by:
        return loader
    if _is_iterable(loader) or loader.batch_size is None:
        raise RunError(
            "expected a DataLoader that makes batches of samples by index, found one of its own batches", "the data",
            "pass batch_size= to the DataLoader",
        )  # fmt: skip
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if in_order:
        return _copy(loader, sampler=SequentialSampler(loader.dataset), **options)  # type: ignore[arg-type]
    return _copy(loader, sampler=LengthGroups(_lengths(loader.dataset, grouped_by), loader.batch_size), **options)


def _lengths(samples: Any, key: str) -> list[int]:
    """Return the length of each sample."""
    first = samples[0]
    name = key if isinstance(first, Mapping) and key in first else "input_ids"
    if not isinstance(first, Mapping) or name not in first:
        shown = ", ".join(map(str, first)) if isinstance(first, Mapping) else type(first).__name__
        raise RunError(f"expected samples with {key!r} or 'input_ids', found {shown}", "the data set")
    column = samples[name] if hasattr(samples, "column_names") else (samples[i][name] for i in range(len(samples)))
    return [_length(value) for value in column]


def _length(value: Any) -> int:
    """Return a length: the number itself, which may be a tensor without dims, or that of a sequence."""
    is_sequence = hasattr(value, "__len__") and getattr(value, "shape", None) != ()
    return len(value) if is_sequence else int(value)


class LengthGroups:
    """Indices of samples in a random order in which samples of similar lengths, in tokens, are in one batch.

    The order is that of transformers: a permutation, drawn from torch's generator, is sorted within pieces of 50
    batches, longest first; the longest sample of all comes first, so that a lack of memory shows at once.
    """

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self._lengths, self._batch_size = lengths, batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        import torch

        count, lengths = len(self._lengths), self._lengths
        order = torch.randperm(count).tolist()
        size = max(1, min(count // (self._batch_size * 4), _GROUPS)) * self._batch_size
        pieces = [sorted(order[i : i + size], key=lengths.__getitem__, reverse=True) for i in range(0, count, size)]
        longest = max(pieces, key=lambda piece: lengths[piece[0]])
        pieces[0][0], longest[0] = longest[0], pieces[0][0]
        return (index for piece in pieces for index in piece)


class _FirstItems:
    """The first items of an iterable or a sampler, each time it is iterated; attributes are those of it."""

    def __init__(self, source: Iterable[Any], count: int) -> None:
        self.limited, self._count = source, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.limited, name)

    def __len__(self) -> int:
        return min(self._count, len(self.limited))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return islice(self.limited, self._count)


def _copy(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a loader of the same data set with other indices of samples."""
    from torch.utils.data import DataLoader

    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers", "in_order"),
    )
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    if loader.batch_sampler is None:
        options["batch_size"] = None
    return DataLoader(loader.dataset, **options, **changed)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)
