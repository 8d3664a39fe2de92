"""Comparison of the batches of all ranks by checksums, which ride on the exchange between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distir_relax.errors import RunError


def difference(everyone: Sequence[Mapping[str, int]], moment: str) -> RunError | None:
    """Compare the checksums of a batch (`Batch.checksums`) of each process; `moment` says which batch it is.

    Return an error with the ranks and the input, if two differ, else None: the same on all processes.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, sums in enumerate(everyone):
        for key, number in sums.items():
            other, expected = first.setdefault(key, (rank, number))
            if number != expected:
                name = key.partition(" ")[0]
                return RunError(
                    f"the ranks get different batches: in {moment} rank {rank} has other numbers for the input "
                    f"{name!r} than rank {other}", "the data",
                    "seed the function's random numbers: every rank takes its rows of the same batch",
                )  # fmt: skip
    return None
