"""Slices of weights, read from a safetensors file into memory.

The file is not mapped: data that were read stay valid when the file is changed or truncated. The format:
https://huggingface.co/docs/safetensors (eight bytes with the length of a JSON header, which gives each tensor's dtype,
shape and bytes; then the bytes).
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle.file_slices import FileSlices
from distir_relax.bundle.manifest import Tensor
from distir_relax.bundle.weights import SAFETENSORS_DTYPES, cut_out
from distir_relax.errors import BundleError
from distir_relax.layout import DTYPES, Interval
from distir_relax.support import Fields, parse_json
from distir_relax.support.file_slices import Slice
from distir_relax.support.large_memory import large_empty

if TYPE_CHECKING:
    import torch

    from distir_relax.support.deferred_tensor import DeferredTensor

_AGAIN = "compile the model again"
WIDENED = {"float32": ("bfloat16", "float16")}
"""Dtypes of files that are read as others, which hold all of their values."""
# Bytes that are read at once if they are then converted, or if only a part of each row is needed.
_BLOCK = 1 << 22
# Bytes of a part of a row from which on it is read alone; fewer are read faster with the rest of the row.
_PART = 1 << 15
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredGroups:
    """A matrix that a model's file has quantized in groups: the bits of a number, and the function that reads it.

    The tensors read are values, scales, and with 4 bits minimums (`distir_relax.kernels.quantized`).
    """

    bits: int
    read: Callable[[], Sequence[torch.Tensor]]


FindGroups: TypeAlias = "Callable[[], StoredGroups | None]"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file: its name there, and the dtype that it is read in.

    A bundle does not refer to a file that `is_temporary`. `groups` finds the quantized
    tensor that it was made of, if there is one in groups.
    """

    file: FileWeights
    key: str
    dtype: str
    is_temporary: bool = False
    groups: FindGroups | None = None

    @classmethod
    def deferred(
        cls, file: FileWeights, key: str, is_temporary: bool = False, groups: FindGroups | None = None
    ) -> DeferredTensor:
        """Return a tensor of the file, which is read when an op needs it."""
        import torch

        from distir_relax.support.deferred_tensor import DeferredTensor

        dtype, shape = file.kinds[key]
        return DeferredTensor.of(shape, getattr(torch, dtype), cls(file, key, dtype, is_temporary, groups))

    def read(self, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return a piece of the tensor, which must not be written to."""
        return self.file.read_as(self.key, self.dtype, intervals)

    def whole(self) -> torch.Tensor:
        """Return the tensor, which must not be written to: within `drawn_weights`, of a large one drawn numbers."""
        dtype, shape = self.file.kinds[self.key]
        if (drawn := _DRAWN.get()) and math.prod(shape) >= _LARGE and "float" in dtype:
            import torch

            return drawn.tensor(self.key, shape, getattr(torch, self.dtype))
        return self.read([[(0, size)] for size in self.file.kinds[self.key][1]])

    def widened(self, dtype: torch.dtype) -> FileTensor | None:
        """Return the tensor in a dtype that holds all values of its own; None for others."""
        name = str(dtype).removeprefix("torch.")
        stored = self.file.kinds[self.key][0]
        return replace(self, dtype=name) if name == stored or stored in WIDENED.get(name, ()) else None


@contextmanager
def drawn_weights() -> Iterator[None]:
    """Let large tensors of files have drawn numbers where a program is compared with its model, which has the same.

    To read and convert those of a file takes many times as long, and each comparison needs all.
    """
    token = _DRAWN.set(_Drawn())
    try:
        yield
    finally:
        _DRAWN.reset(token)


_LARGE = 1 << 22
"""Elements of a tensor that is drawn."""
_PERIOD = (1 << 20) - 3
"""Numbers that are drawn, and repeated: a prime, so that rows differ."""


class _Drawn:
    """Drawn numbers of each dtype, as many as the largest tensor has, and a period more."""

    def __init__(self) -> None:
        self._numbers: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of a tensor: tensors of other names begin elsewhere."""
        import torch

        count, start = math.prod(shape), zlib.crc32(key.encode()) % _PERIOD
        if (numbers := self._numbers.get(dtype)) is None or len(numbers) < count + _PERIOD:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(_PERIOD, generator=generator, dtype=torch.float32).mul_(0.02).to(dtype)
            numbers = self._numbers[dtype] = large_empty((count + _PERIOD,), dtype)
            for first in range(0, len(numbers), _PERIOD):
                numbers[first : first + _PERIOD] = drawn[: len(numbers) - first]
        return numbers[start : start + count].view(tuple(shape))


_DRAWN: ContextVar[_Drawn | None] = ContextVar("drawn", default=None)


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int


class FileWeights:
    """Weights in a safetensors file, of which only the requested bytes are read.

    The file stays open, so that a replacement at its path is not read. Ranks of one process share a piece while it is
    in use. `keys` are the names in the file of tensors that it has under another one. Raises BundleError, with `hint`,
    when the file is missing or truncated, does not contain the tensors of the manifest, or is written to after it was
    opened.
    """

    def __init__(
        self, path: Path, tensors: Sequence[Tensor], keys: Mapping[str, str] | None = None, hint: str = _AGAIN
    ) -> None:
        self.path, self.hint = path, hint
        self._keys = keys or {}
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        try:
            # The path may be a FIFO by now: O_NONBLOCK does not wait for a writer.
            self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        except FileNotFoundError:
            raise self._error("the weights are missing") from None
        except OSError as wrong:
            raise self._error(f"the weights cannot be read: {wrong.strerror}") from None
        weakref.finalize(self, self._file.close)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise self._error("the weights are not a file")
        self._opened = self.identity
        self._entries = self._header()
        self._kinds = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
        self._pieces: weakref.WeakValueDictionary[object, torch.Tensor] = weakref.WeakValueDictionary()
        self._copied = FileSlices.of(path)
        self._held = None if self._copied is None else frozenset(self._copied.slices)
        for tensor in tensors:
            key = self._keys.get(tensor.name, tensor.name)
            if key not in self._entries:
                raise self._error(f"the weights file lacks {key!r}")
            entry = self._entries[key]
            is_readable = entry.dtype in (tensor.dtype, *WIDENED.get(tensor.dtype, ()))
            if not is_readable or entry.shape != tensor.shape:
                raise self._error(
                    f"the manifest says {tensor.name!r} is {tensor.dtype} {tensor.shape}, the file has "
                    f"{entry.dtype} {entry.shape}"
                )

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Return the identity and state of the file, equal for two handles of one file without a write between them."""
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    @property
    def size(self) -> int:
        """Return the bytes of the file when it was opened."""
        return self._opened[2]

    @property
    def kinds(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and shape of each tensor of the file, by name."""
        return self._kinds

    def checksum(self) -> str:
        """Return the SHA-256 of the file, in hex. Raises BundleError when it was written to.

        Of a copy that holds slices only, it is the one that the whole file had where these came from.
        """
        if self._copied is not None:
            return self._copied.whole if self._copied.are_in(self._file.fileno()) else ""
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256")
        self._check_unchanged()
        return digest.hexdigest()

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`. The result must not be written to."""
        key = self._keys.get(name, name)
        if key not in self._entries:
            raise self._error(f"the weights file has no {name!r}")
        return self.read_as(key, self._dtypes.get(name, self._entries[key].dtype), intervals)

    def read_as(self, key: str, dtype: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return a piece of the tensor `key` of the file, converted to `dtype`. It must not be written to."""
        identity = key, dtype, tuple(tuple(map(tuple, pieces)) for pieces in intervals)
        piece = self._pieces.get(identity)
        if piece is None:
            if not self._holds(key, intervals):
                raise self._error(f"this copy has the slices of other ranks, not these of {key!r}")
            piece = self._pieces[identity] = self._read(self._entries[key], dtype, intervals)
            self._check_unchanged()
        return piece

    def slices(self, key: str, intervals: Sequence[Sequence[Interval]]) -> list[Slice]:
        """Return the bytes of the file that have a piece of the tensor `key`, and maybe others."""
        entry = self._entries[key]
        split = next((d for d, pieces in enumerate(intervals) if list(pieces) != [(0, entry.shape[d])]), None)
        size = math.prod(entry.shape) * DTYPES[entry.dtype][1]
        if split is None or not size:
            return [Slice(entry.start, size)]
        outer = math.prod(entry.shape[:split])
        item, row = size // outer // entry.shape[split], size // outer
        parts = ((entry.start + a * item, (b - a) * item) for a, b in intervals[split] if a < b)
        return [Slice(start, length, row if outer > 1 else 0, outer) for start, length in parts]

    def _holds(self, key: str, intervals: Sequence[Sequence[Interval]]) -> bool:
        return self._held is None or self._held.issuperset(one for one in self.slices(key, intervals) if one.bytes)

    def header(self) -> Slice:
        """Return the bytes of the header."""
        return Slice(0, 8 + int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little"))

    def copied(self, slices: Sequence[Slice], checksum: str) -> FileSlices:
        """Return slices of the file for a copy, whose `checksum` has been verified."""
        return FileSlices.from_file(self._file.fileno(), slices, checksum)

    def _read(self, entry: _Entry, dtype: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Read the pieces of the first split dim; further dims are sliced in memory."""
        import torch

        shape = entry.shape
        split = next((d for d, pieces in enumerate(intervals) if list(pieces) != [(0, shape[d])]), None)
        pieces = [(0, 1)] if split is None else [(a, b) for a, b in intervals[split] if a < b]
        outer = 1 if split is None else math.prod(shape[:split])
        size = 1 if split is None else shape[split]
        length = sum(b - a for a, b in pieces)
        stored = getattr(torch, entry.dtype)
        inner = math.prod(shape if split is None else shape[split + 1 :])
        target = large_empty((outer, length, inner), getattr(torch, dtype))
        item = inner * stored.itemsize
        # Small parts of rows are cut out of blocks of rows.
        is_direct = outer == 1 or all((b - a) * item >= _PART for a, b in pieces)
        rows = 1 if is_direct else max(1, _BLOCK // max(1, size * item))
        for first in range(0, outer if target.numel() else 0, rows):
            start, position = entry.start + first * size * item, 0
            block = None if is_direct else torch.empty((min(rows, outer - first), size, inner), dtype=stored)
            if block is not None:
                self._fill(block, start, stored)
            for a, b in pieces:
                part = target[first : first + rows, position : position + b - a]
                if block is None:
                    self._fill(part, start + a * item, stored)
                else:
                    part.copy_(block[:, a:b])
                position += b - a
        if split is None:
            return target.view(shape)
        rest = [[(0, length)] if d == split else list(pieces) for d, pieces in enumerate(intervals)]
        return cut_out(target.view(*shape[:split], length, *shape[split + 1 :]), rest).contiguous()

    def _fill(self, target: torch.Tensor, position: int, stored: torch.dtype) -> None:
        """Read numbers of the dtype `stored`, from a position of the file on, into a contiguous tensor."""
        import torch

        flat = target.view(-1)
        if flat.dtype == stored:
            self._fill_bytes(flat, position)
            return
        buffer = torch.empty(min(flat.numel(), _BLOCK // stored.itemsize), dtype=stored)
        for start in range(0, flat.numel(), buffer.numel()):
            part = buffer[: flat.numel() - start]
            self._fill_bytes(part, position + start * stored.itemsize)
            flat[start : start + part.numel()] = part

    def _fill_bytes(self, target: torch.Tensor, position: int) -> None:
        import torch

        content: Any = target.view(torch.uint8).numpy()
        view = memoryview(content)
        while len(view):
            count = os.preadv(self._file.fileno(), [view], position)
            if not count:
                raise self._error("the weights were truncated while they were read")
            view, position = view[count:], position + count

    def _header(self) -> dict[str, _Entry]:
        size = self._opened[2]
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little") if size >= 8 else -1
        if not 0 <= length <= min(size - 8, _MOST_HEADER):
            raise self._error("the weights are damaged or half-written: no header fits the file")
        where = str(self.path)
        table = parse_json(os.pread(self._file.fileno(), length, 8), BundleError, where)
        entries = {}
        fields = Fields.of(table, BundleError, where)
        for name in fields.table:
            if name == "__metadata__":
                continue
            one = fields.fields(name)
            dtype = SAFETENSORS_DTYPES.get(one.text("dtype"), one.text("dtype"))
            shape, offsets = one.wholes("shape"), one.wholes("data_offsets")
            if dtype not in DTYPES or len(offsets) != 2:
                raise self._error(f"the weights are damaged: {name!r} has dtype {dtype!r} and bytes {offsets}")
            start, stop = offsets
            if stop - start != math.prod(shape) * DTYPES[dtype][1] or 8 + length + stop > size:
                raise self._error(f"the weights are damaged or half-written: the bytes of {name!r} are incomplete")
            entries[name] = _Entry(dtype, shape, 8 + length + start)
        return entries

    def _check_unchanged(self) -> None:
        if self.identity != self._opened:
            raise self._error("the weights were modified while they were read")

    def _error(self, message: str) -> BundleError:
        return BundleError(message, str(self.path), self.hint)
