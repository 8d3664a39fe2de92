"""Data for a small model in training, named on the command line: ranks import it, and not the compiler."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

ROWS = 11
Batch = tuple[torch.Tensor, torch.Tensor]


def drawn(number: int) -> Batch:
    """A batch that follows from its number."""
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number))
    return x, 2 * x[:, :3]


def batches(start: int = 0) -> Iterator[Batch]:
    """Batches without end, from one on."""
    while True:
        yield drawn(start)
        start += 1


def epoch() -> Iterator[Batch]:
    """The five batches of an epoch."""
    return map(drawn, range(5))


def few(start: int) -> list[Batch]:
    """What is left of seven batches."""
    return [drawn(i) for i in range(start, 7)]


def with_nan(start: int) -> Iterator[Batch]:
    """Batches of which that of step 5 is no number."""
    for number, (x, target) in enumerate(batches(start), start + 1):
        yield (x * float("nan") if number == 5 else x), target


def failing(start: int) -> Iterator[Batch]:
    """Two batches, and an error of the user's."""
    yield drawn(start)
    yield drawn(start + 1)
    raise LookupError("the file has gone")


def nothing() -> None:
    """No data at all."""


def slow(start: int) -> Iterator[Batch]:
    """Batches that take their time."""
    for batch in batches(start):
        time.sleep(0.05)
        yield batch


def very_slow(start: int) -> Iterator[Batch]:
    """Batches that take longer than the second in which ranks end after SIGTERM."""
    for batch in batches(start):
        time.sleep(1.5)
        yield batch


class Table:
    """A data set of 37 samples, which notes what is read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        x = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return x, 2 * x[:3]


def samples() -> Table:
    """The data set."""
    return Table()


def held_out() -> list[Batch]:
    """Two batches to evaluate."""
    return [drawn(101), drawn(102)]


def loader() -> DataLoader[Batch]:
    """A loader of the data set, which has another order in each epoch."""
    return DataLoader(Table(), batch_size=ROWS, shuffle=True, drop_last=True)  # type: ignore[arg-type]
