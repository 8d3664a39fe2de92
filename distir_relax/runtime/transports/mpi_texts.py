"""Exchange of texts over MPI by buffers: the methods of mpi4py for objects would unpickle what other ranks send."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.errors import RunError

MOST = 1 << 28
"""Maximum length of all texts together, in bytes."""


def gather_texts(comm: Any, text: str) -> list[str]:
    """Return the text of each rank of an MPI communicator, in rank order; all of them call this together.

    Raises RunError, on all ranks, if their texts are longer than `MOST` together.
    """
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    sizes = np.zeros(comm.Get_size(), dtype=np.int64)
    comm.Allgather(np.array([data.size], dtype=np.int64), sizes)
    if sizes.min() < 0 or sizes.sum() > MOST:
        raise RunError(f"expected messages of at most {MOST:,} bytes together, found {sizes.tolist()}")
    ends = np.cumsum(sizes)
    received = np.empty(int(ends[-1]), dtype=np.uint8)
    comm.Allgatherv(data, [received, sizes, ends - sizes, _byte()])
    bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return [received[start:end].tobytes().decode() for start, end in bounds]


def _byte() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
