"""Shared safetensors file of global tensors, into which each rank writes its own shards.

The format: https://huggingface.co/docs/safetensors (eight bytes with the length of a JSON header, which gives each
tensor's dtype, shape and bytes; then the bytes).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Tensor, safetensors_header
from distir_relax.errors import CheckpointError
from distir_relax.layout import DTYPES, Interval
from distir_relax.support.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    import torch


class StateFile:
    """A file of `tensors`, created in its final size, or opened if another rank has created it.

    ``with StateFile(path, tensors) as file: file.write(...)``; the data are on disk when the block ends.
    Raises CheckpointError when it cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[Tensor], make: bool = False) -> None:
        self.path = path
        header, self._starts, size = safetensors_header(tensors)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        try:
            self._file = os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if make else 0), 0o666)
        except OSError as wrong:
            shared = "" if make else "all ranks must see the folder of checkpoints: put it on a file system they share"
            raise self._error(wrong, shared) from None
        if make:
            try:
                # Fails early if the disk is too small.
                os.posix_fallocate(self._file, 0, size)
                self._put(memoryview(header), 0)
            except OSError as wrong:
                os.close(self._file)
                raise self._error(wrong) from None

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                os.fsync(self._file)
        except OSError as wrong:
            raise self._error(wrong) from None
        finally:
            os.close(self._file)

    def write(self, name: str, intervals: Sequence[Sequence[Interval]], part: torch.Tensor) -> None:
        """Write the piece of a tensor whose dims are the joined `intervals` of the dims of the global tensor."""
        tensor = self._tensors[name]
        content: Any = tensor_bytes(part).numpy()
        view, position = memoryview(content), 0
        try:
            for start, length in runs(tensor.shape, intervals, DTYPES[tensor.dtype][1]):
                self._put(view[position : position + length], self._starts[name] + start)
                position += length
        except OSError as wrong:
            raise self._error(wrong) from None

    def _put(self, view: memoryview, position: int) -> None:
        while len(view):
            count = os.pwrite(self._file, view, position)
            view, position = view[count:], position + count

    def _error(self, wrong: OSError, hint: str = "") -> CheckpointError:
        return CheckpointError(f"the checkpoint cannot be written: {wrong.strerror}", str(self.path), hint)


def runs(shape: Sequence[int], intervals: Sequence[Sequence[Interval]], size: int) -> Iterator[tuple[int, int]]:
    """Return the byte ranges of a piece in the global tensor, as (start, length), in the order of the piece.

    `size` is that of an element::

        a piece of rows 1 and 3 of a 4x5 matrix, elements of one byte:   (5, 5), (15, 5)
        a piece of columns 1 and 2:                                      (1, 2), (6, 2), (11, 2), (16, 2)
    """
    import numpy as np

    split = max((d for d, pieces in enumerate(intervals) if list(pieces) != [(0, shape[d])]), default=-1)
    strides = [size] * (len(shape) + 1)
    for d in reversed(range(len(shape))):
        strides[d] = strides[d + 1] * shape[d]
    if split < 0:
        if strides[0]:
            yield 0, strides[0]
        return
    offsets = np.zeros(1, dtype=np.int64)
    for d in range(split):
        indices = [np.arange(a, b, dtype=np.int64) for a, b in intervals[d]]
        rows = np.concatenate(indices) if indices else np.zeros(0, dtype=np.int64)
        offsets = np.add.outer(offsets, rows * strides[d + 1]).reshape(-1)
    inner = strides[split + 1]
    pieces = [(a * inner, (b - a) * inner) for a, b in intervals[split] if a < b and inner]
    for offset in offsets.tolist():
        for start, length in pieces:
            yield offset + start, length
