"""Batches of a `torch.utils.data.DataLoader`, in an order that is equal on all ranks and in resumed runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.errors import RunError
from distir_relax.layout import is_symbolic
from distir_relax.runtime.training.batches import data_inputs

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


def is_loader(data: Any) -> bool:
    """Return whether it is a `torch.utils.data.DataLoader`."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, module.DataLoader)


def check_loader(loader: DataLoader[Any], manifest: Manifest) -> None:
    """Raise RunError for a last batch of an epoch that a program of one batch size does not take."""
    from torch.utils.data.distributed import DistributedSampler

    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise RunError(
            "expected a loader of whole batches, of which each rank takes its rows, found a DistributedSampler",
            "the DataLoader", "leave the sampler out; shuffle=True shuffles alike on all ranks",
        )  # fmt: skip
    first = next(iter(data_inputs(manifest)), None)
    if not _is_map_style(loader) or loader.batch_size is None or loader.drop_last or first is None or not first.shape:
        return
    rest = _length(loader.sampler) % loader.batch_size
    if rest and not is_symbolic(first.shape[0]):
        raise RunError(
            f"expected batches of {first.shape[0]} samples, found {rest} in the last one of an epoch",
            "the DataLoader", "pass drop_last=True to it, or compile with dynamic_shapes",
        )  # fmt: skip


class LoaderEpochs:
    """Batches of a loader by epoch, each in an order that follows from a seed.

    Samplers draw from torch's generator, or one of their own, seeded anew for each epoch. Loading in this process draws
    from torch's generator, seeded anew for each batch. Batches before the first step are skipped in the sampler, if the
    data set has samples by index; otherwise they are loaded.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._epoch = -1
        self._indices = _Indices(loader, seed) if _is_map_style(loader) else None
        if self._indices is not None:
            self._loader = _with_indices(loader, self._indices)

    def begin(self, step: int) -> Iterator[Any]:
        """Return the batches from a step on, or those of the next epoch."""
        if self._epoch >= 0:
            self._epoch += 1
            return self._batches(step)
        self._epoch = 0
        if self._indices is None:
            return self._load_up_to(step)
        self._epoch, skipped = self._indices.find(step)
        return self._batches(step, skipped)

    def _batches(self, step: int, skipped: int = 0) -> Iterator[Any]:
        """Return the batches of this epoch after those `skipped`; the first is that of `step`."""
        import torch

        if self._indices is None:
            _seed_epoch(self._loader, self._seed, self._epoch)
        else:
            self._indices.epoch, self._indices.skipped = self._epoch, skipped
        with _drawing(torch.Generator().manual_seed(_mixed(self._seed, self._epoch))):
            batches = iter(self._loader)
        for number in count(step):
            with _drawing(torch.Generator().manual_seed(_mixed(self._seed + 1, number))):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _load_up_to(self, step: int) -> Iterator[Any]:
        """Return the batches of the epoch that has the batch of `step`, from it on; load those before."""
        number = 0
        while True:
            first = number
            for batch in self._batches(number):
                number += 1
                if number > step:
                    yield batch
            if number > step or number == first:
                return
            self._epoch += 1


class _Indices:
    """Indices of the samples of each batch in an epoch, after the first batches that are `skipped`."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.epoch = 0
        self.skipped = 0

    def __len__(self) -> int:
        return _length(self._source)

    def __iter__(self) -> Iterator[Any]:
        import torch

        _seed_epoch(self._loader, self._seed, self.epoch)
        generator = torch.Generator().manual_seed(_mixed(self._seed, self.epoch))
        with _drawing(generator):
            indices = iter(self._source)
        for number in count():
            with _drawing(generator):
                batch = next(indices, _END)
            if batch is _END:
                return
            if number >= self.skipped:
                yield batch

    def find(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, counted from 0, and the number of batches before it in the epoch."""
        epoch = 0
        while True:
            _seed_epoch(self._loader, self._seed, epoch)
            size = _length(self._source)
            if step < size or size == 0:
                return epoch, step
            epoch, step = epoch + 1, step - size


def _with_indices(loader: DataLoader[Any], indices: _Indices) -> DataLoader[Any]:
    """Return a loader of the same data set with other indices of samples."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
            *("prefetch_factor", "persistent_workers", "in_order"),
        )
    }
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=indices, **options)
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


def _is_map_style(loader: DataLoader[Any]) -> bool:
    """Return whether the loader iterates over indices of samples, without an iterator of its own class."""
    from torch.utils.data import DataLoader, IterableDataset

    return type(loader).__iter__ is DataLoader.__iter__ and not isinstance(loader.dataset, IterableDataset)


def _seed_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Seed the generators of a loader and its samplers for an epoch, and set the epoch of those that have one."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    part: Any
    for part in (loader, loader.batch_sampler, sampler, loader.dataset):
        if (generator := getattr(part, "generator", None)) is not None and hasattr(generator, "manual_seed"):
            generator.manual_seed(_mixed(seed, epoch))
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


@contextmanager
def _drawing(generator: torch.Generator) -> Iterator[None]:
    """Let torch's default generator continue that one; its own state is restored afterwards."""
    import torch

    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _length(sampler: Any) -> int:
    """Return the number of items of a sampler, which are counted if it has no length."""
    try:
        return len(sampler)
    except TypeError:
        return sum(1 for _ in sampler)


def _mixed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % 2**63


_END = object()
