"""Batches of a run that continues: those before its position are skipped, by their number or by their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from distir_relax.checkpoints import DataPosition
from distir_relax.errors import RunError

_Item = TypeVar("_Item")
_END = object()


def skip_batches(
    at: DataPosition, rows: int, epochs: Callable[[], Iterator[_Item]], samples_of: Callable[[_Item], int]
) -> tuple[Iterator[_Item], DataPosition]:
    """Return the batches from a position on, and the position, in batches that typically have `rows` samples.

    `epochs()` returns the batches of the next epoch. Raises RunError if the position is within a batch.
    """
    if at.epoch is None:
        left, epoch = at.batches, 0
        while True:
            items, position = epochs(), DataPosition(at.batches, epoch, rows=rows)
            items, position = _skip_number(items, left, position, samples_of)
            left -= position.place
            if not left or not position.place:
                return items, position
            epoch += 1
    for _ in range(at.epoch):
        for _ in epochs():
            pass
    return skip_in_epoch(at, rows, epochs(), samples_of)


def skip_in_epoch(
    at: DataPosition, rows: int, items: Iterator[_Item], samples_of: Callable[[_Item], int]
) -> tuple[Iterator[_Item], DataPosition]:
    """Return those of the batches of an epoch that a position is before, and the position; see `skip_batches`."""
    position = DataPosition(at.batches, at.epoch, rows=rows)
    if at.rows in (0, rows):
        return _skip_number(items, at.place, position, samples_of)
    while position.samples < at.samples and (item := next(items, _END)) is not _END:
        position = position.after(samples_of(item))  # type: ignore[arg-type]
    if position.samples != at.samples:
        raise RunError(
            f"expected a batch that begins after {at.samples} samples of the epoch, where the checkpoint was written "
            f"with batches of {at.rows}, found one from {position.samples - rows} to {position.samples}", "the data",
            f"resume with batches of {at.rows} to the end of the epoch, or give a data set of single samples or a "
            "DataLoader with batch_size, whose batches can begin anywhere",
        )  # fmt: skip
    return items, DataPosition(at.batches, at.epoch, position.place, position.samples, rows)


def _skip_number(
    items: Iterator[_Item], count: int, position: DataPosition, samples_of: Callable[[_Item], int]
) -> tuple[Iterator[_Item], DataPosition]:
    place = samples = 0
    for item in islice(items, count):
        place, samples = place + 1, samples + samples_of(item)
    return items, DataPosition(position.batches, position.epoch, place, samples, position.rows)
