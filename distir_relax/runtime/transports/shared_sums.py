"""All-reduces of ranks on one machine through memory that they share (`kernels.native.shared_sum`).

MPI and gloo reduce bfloat16 as float32, and make more copies of other numbers: see docs/performance.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distir_relax.kernels.native import AREA, STORED, Kernel, shared_sum, stored_name
from distir_relax.runtime.native_waits import NativeWaits

if TYPE_CHECKING:
    import torch

_NAME = "distir-sums"
_TOKEN = 16
_MOST_RANKS = 8
"""More ranks read more of each other's memory than the parts of an all-reduce by MPI are."""


class SharedSums:
    """Sums over the ranks of a group, in `memory` with an area for each; `of` makes them."""

    def __init__(self, memory: mmap.mmap, kernels: Mapping[str, Kernel], rank: int, ranks: int) -> None:
        self._memory = memory
        self._kernels = kernels
        self._rank = rank
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._areas = array("q", [first + number * AREA for number in range(ranks)])
        self._next_call = array("q", [1])
        self._ignored = NativeWaits()
        """What callers that record their waiting themselves do not read."""

    @classmethod
    def of(cls, rank: int, ranks: int, exchange: Callable[[str], Sequence[str]]) -> SharedSums | None:
        """Return the sums of a group, whose ranks all call this together. `exchange` returns the text of each rank.

        None if they are on several machines, too many, or one of them has no native kernels.
        """
        kernels: dict[str, Kernel] = {}
        if 1 < ranks <= _MOST_RANKS and hasattr(os, "memfd_create"):
            kernels = {dtype: kernel for dtype in STORED if (kernel := shared_sum(dtype, ranks)) is not None}
        created = _create(ranks * AREA) if rank == 0 and kernels else None
        place = exchange("" if created is None else created[1].text())[0]
        memory = None if created is None else created[0]
        if rank and place and kernels:
            memory = _open(_Place.read(place), ranks * AREA)
        has_all = memory is not None and len(kernels) == len(STORED)
        can = all(exchange("yes" if has_all else ""))
        if created is not None:
            # Once all have opened it, nobody needs the file.
            os.close(created[1].file)
        return cls(memory, kernels, rank, ranks) if can and memory is not None else None

    def sum(self, x: torch.Tensor, out: torch.Tensor, number: int = 0, waits: NativeWaits | None = None) -> bool:
        """Write the sum of the ranks' tensors to `out`; return False for tensors of another kind.

        Both are contiguous, of one dtype, and may be the same. `number` is that of the program's step, which is in
        `waits`, if it is given, while this rank waits for others.
        """
        dtype = stored_name(x.dtype) if x.is_cpu else None
        if dtype is None:
            return False
        self._kernels[dtype](*self._arguments(x, out, number, waits or self._ignored))
        return True

    def _arguments(self, x: torch.Tensor, out: torch.Tensor, number: int, waits: NativeWaits) -> list[int]:
        next_call, _ = self._next_call.buffer_info()
        places = [x.data_ptr(), out.data_ptr(), x.numel(), self._rank, next_call, number, waits.address]
        return [*places, self._areas.buffer_info()[0]]


class _Place(NamedTuple):
    """Where memory is: a process, the number of its open file, and the bytes after it."""

    process: int
    file: int
    token: bytes

    def text(self) -> str:
        """Return the place as text."""
        return f"{self.process} {self.file} {self.token.hex()}"

    @classmethod
    def read(cls, text: str) -> _Place:
        """The inverse of `text`."""
        process, file, token = text.split()
        return cls(int(process), int(file), bytes.fromhex(token))


def _create(size: int) -> tuple[mmap.mmap, _Place] | None:
    """Return memory, and where others find it."""
    try:
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(file, size + _TOKEN)
        memory = mmap.mmap(file, size + _TOKEN)
    except OSError:
        return None
    token = os.urandom(_TOKEN)
    memory[size:] = token
    return memory, _Place(os.getpid(), file, token)


def _open(place: _Place, size: int) -> mmap.mmap | None:
    """Return the memory of another process; None if that is on another machine, whatever has its number on this one."""
    path = f"/proc/{place.process}/fd/{place.file}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(file, size + _TOKEN)
        os.close(file)
    except (OSError, ValueError):
        return None
    return memory if memory[size:] == place.token else None
