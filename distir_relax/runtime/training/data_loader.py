"""Batches of a `torch.utils.data.DataLoader`, in an order that is equal on all ranks and in resumed runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import DataPosition
from distir_relax.errors import RunError
from distir_relax.layout import is_symbolic
from distir_relax.runtime.training.batches import data_inputs, samples_in
from distir_relax.runtime.training.skip_batches import skip_batches, skip_in_epoch

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

    Samplers draw from torch's generator, seeded anew for each epoch, or from one of their own, which continues from
    epoch to epoch as in torch. Loading in this process draws from torch's generator, seeded anew for each batch.
    Generators of the user are left as they were. Batches before the first step are skipped in the sampler, if the data
    set has samples by index; otherwise they are loaded. A batch has typically `rows` samples.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rows: int) -> None:
        self._loader, self._seed, self._rows = loader, seed, rows
        noise = getattr(loader.dataset, "generator", None)
        self._noise = noise if hasattr(noise, "manual_seed") else None
        self._noise_seed = self._noise.initial_seed() if self._noise is not None else 0
        self._indices = _Indices(loader, seed, rows) if _is_map_style(loader) else None
        if self._indices is not None:
            self._loader = _with_indices(loader, self._indices)
        self._epochs = 0

    @property
    def order(self) -> dict[str, str]:
        """See `Data`: the number of samples, the samplers, and the seeds of generators of their own."""
        return {} if self._indices is None else self._indices.order

    def begin(self, at: DataPosition) -> tuple[Iterator[Any], DataPosition]:
        """Return the batches from a position on to the end of its epoch, and the position."""
        if self._indices is not None:
            at = self._indices.begin(at)
            assert at.epoch is not None, "indices have epochs"
            return self._load(at.epoch, at.batches), at
        if self._epochs:
            return self._next(at.batches), at
        loaded = count()
        return skip_batches(at, self._rows, lambda: self._next(loaded), samples_in)

    def batches_after(self, at: DataPosition) -> int | None:
        """Return how many batches the epoch of a position has after it; None for a stream without a length."""
        if self._indices is not None:
            return self._indices.batches_after(at)
        try:
            return len(self._loader) - at.place
        except TypeError:
            return None

    def _next(self, first: int | Iterator[int]) -> Iterator[Any]:
        """Return the batches of the next epoch."""
        self._epochs += 1
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(self._epochs - 1)
        return self._load(self._epochs - 1, first)

    def _load(self, epoch: int, first: int | Iterator[int]) -> Iterator[Any]:
        """Return the batches of an epoch, of numbers from `first` on, or those of an iterator."""
        import torch

        draws = _Draws({torch.default_generator: _mixed(self._seed, epoch)})
        if self._noise is not None:
            draws.seed(self._noise, _mixed(self._seed + self._noise_seed, epoch))
        with draws():
            batches = iter(self._loader)
        for number in count(first) if isinstance(first, int) else first:
            draws.seed(torch.default_generator, _mixed(self._seed + 1, number))
            with draws():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


class _Indices:
    """Indices of the samples of each batch, from the position of `begin` on to the end of its epoch."""

    def __init__(self, loader: DataLoader[Any], seed: int, rows: int) -> None:
        self._loader, self._seed, self._rows = loader, seed, rows
        self._source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        own: list[Any] = [getattr(part, "generator", None) for part in _parts(loader)]
        self._own = _Draws({generator: None for generator in own if hasattr(generator, "manual_seed")})
        self._drawn = 0
        self._rest: Iterator[Any] = iter(())

    @property
    def order(self) -> dict[str, str]:
        """See `LoaderEpochs.order`."""
        _, batches, sampler = _parts(self._loader)
        # A limit of batches does not change their order.
        parts = (getattr(part, "limited", part) for part in (sampler, batches) if part is not None)
        names = dict.fromkeys(type(part).__name__ for part in parts)
        seeds = (str(generator.initial_seed()) for generator in self._own.generators)
        found = {"order": f"a DataLoader with {' and '.join(names)}", "generator": ", ".join(seeds) or "none"}
        with suppress(TypeError):
            found["samples"] = str(len(self._loader.dataset))  # type: ignore[arg-type]
        return found

    def __len__(self) -> int:
        return _length(self._source)

    def __iter__(self) -> Iterator[Any]:
        return self._rest

    def begin(self, at: DataPosition) -> DataPosition:
        """Begin with the batch after a position; return the position."""
        from torch.utils.data import BatchSampler

        if at.epoch is None:
            at = self._locate(at)
        assert at.epoch is not None, "it was located"
        while self._own and self._drawn < at.epoch:
            for _ in self._epoch(self._drawn, self._own):
                pass
            self._drawn += 1
        self._drawn = at.epoch + 1
        if type(self._source) is BatchSampler:
            source = self._source
            indices = islice(self._epoch(at.epoch, self._own, source.sampler), at.samples, None)
            self._rest = _cut(indices, source.batch_size, source.drop_last)
            return DataPosition(at.batches, at.epoch, at.samples // self._rows, at.samples, self._rows)
        is_batch = self._loader.batch_sampler is not None
        if not is_batch and at.samples and at.rows not in (0, self._rows):
            raise RunError(
                f"expected whole batches of {at.rows} samples, as before the resume, found {self._rows}",
                "the DataLoader", "a DataLoader with batch_size can continue with batches of another size",
            )  # fmt: skip
        samples_of: Callable[[Any], int] = len if is_batch else lambda index: self._rows
        self._rest, at = skip_in_epoch(at, self._rows, self._epoch(at.epoch, self._own), samples_of)
        return at

    def batches_after(self, at: DataPosition) -> int:
        """See `LoaderEpochs.batches_after`."""
        from torch.utils.data import BatchSampler

        if type(self._source) is not BatchSampler:
            return _length(self._source) - at.place
        whole, rest = divmod(_length(self._source.sampler) - at.samples, self._source.batch_size)
        return whole + (rest > 0 and not self._source.drop_last)

    def _locate(self, at: DataPosition) -> DataPosition:
        """Return the position after a number of batches."""
        epoch, left, scratch = 0, at.batches, self._own.copy()
        while True:
            try:
                size = len(self._source)  # type: ignore[arg-type]
            except TypeError:
                size = sum(1 for _ in self._epoch(epoch, scratch))
            if left < size or size == 0:
                return DataPosition(at.batches, epoch, left, left * self._rows, self._rows)
            epoch, left = epoch + 1, left - size

    def _epoch(self, epoch: int, own: _Draws, source: Any = None) -> Iterator[Any]:
        """Return the items of a sampler in an epoch, by default the batches."""
        import torch

        for part in (*_parts(self._loader), self._loader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        draws = _Draws({torch.default_generator: _mixed(self._seed, epoch)})
        with draws(), own():
            items = iter(self._source) if source is None else None
            if (generator := self._loader.generator) is not None:
                # Torch's loader draws the seed of its workers.
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            items = iter(source) if items is None else items
        while True:
            with draws(), own():
                item = next(items, _END)
            if item is _END:
                return
            yield item


class _Draws:
    """States of generators, which are theirs while a block draws from them, and restored to what they were after it.

    A generator begins with the state of its seed, or with its own if that is None.
    """

    def __init__(self, seeds: dict[torch.Generator, int | None]) -> None:
        self._states: dict[torch.Generator, torch.Tensor] = {}
        for generator, seed in seeds.items():
            if seed is None:
                self._states[generator] = generator.get_state()
            else:
                self.seed(generator, seed)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators."""
        return tuple(self._states)

    def __bool__(self) -> bool:
        return bool(self._states)

    def seed(self, generator: torch.Generator, seed: int) -> None:
        """Give a generator the state of a seed."""
        import torch

        self._states[generator] = torch.Generator().manual_seed(seed).get_state()

    def copy(self) -> _Draws:
        """Return the same states."""
        other = _Draws({})
        other._states = dict(self._states)
        return other

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Return a context in which the generators continue these states."""
        before = {generator: generator.get_state() for generator in self._states}
        for generator, state in self._states.items():
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in before.items():
                self._states[generator] = generator.get_state()
                generator.set_state(state)


def _cut(indices: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Return lists of `size` indices; the last one may be shorter."""
    while batch := list(islice(indices, size)):
        if len(batch) == size or not drop_last:
            yield batch


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


def _parts(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return the objects that choose the samples."""
    return loader, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)


def _length(sampler: Any) -> int:
    """Return the number of items of a sampler, which are counted if it has no length."""
    try:
        return len(sampler)
    except TypeError:
        return sum(1 for _ in sampler)


def _mixed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % 2**63


_END = object()
