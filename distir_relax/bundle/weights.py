"""Where a bundle's weights come from: tensors in memory, or slices of a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.bundle.format import Tensor
from distir_relax.errors import BundleError
from distir_relax.layout import DTYPES, Interval

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.safetensors"
_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class WeightSource(Protocol):
    """Reads pieces of global tensors."""

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """The piece of `name` at `intervals[dim]`, pieces of a dim concatenated in order; contiguous.

        Raises BundleError when there is no such tensor.
        """
        ...


class TensorWeights:
    """Weights held in memory as global tensors. A whole tensor is returned as it is, not copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`."""
        if name not in self._tensors:
            raise BundleError("the bundle has no such weight", name)
        tensor = self._tensors[name].detach()
        if tensor.is_meta:
            raise BundleError(
                "the weight has no data: it is on the meta device",
                name,
                "give compile a checkpoint that holds it: compile(..., checkpoint='model.safetensors')",
            )
        return _slice(tensor, intervals).contiguous()


class FileWeights:
    """Weights in a safetensors file, of which only the bytes asked for are read.

    Raises BundleError when the file is missing or truncated, or does not hold the tensors of the manifest.
    """

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        open_untyped: Any = safe_open
        try:
            # The handle maps the file; it stays open for as long as weights may be read.
            self._file = open_untyped(str(path), framework="pt")
        except FileNotFoundError:
            raise BundleError("the weights are missing", str(path), "compile the model again") from None
        except (SafetensorError, OSError) as wrong:
            raise BundleError(
                f"the weights are damaged or half-written: {wrong}", str(path), "compile the model again"
            ) from None
        names = set(self._file.keys())
        for tensor in tensors:
            if tensor.name not in names:
                raise BundleError(f"the weights file lacks {tensor.name!r}", str(path), "compile the model again")
            header = self._file.get_slice(tensor.name)
            found = (_SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype()), tuple(header.get_shape()))
            if found != (tensor.dtype, tensor.shape):
                raise BundleError(
                    f"the manifest says {tensor.name!r} is {tensor.dtype} {tensor.shape}, the file has "
                    f"{found[0]} {found[1]}", str(path), "compile the model again")  # fmt: skip

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`."""
        import torch

        try:
            source = self._file.get_slice(name)
        except Exception as wrong:
            raise BundleError(f"the weights file has no {name!r}: {wrong}", str(self.path)) from None
        if not intervals or 0 in source.get_shape():
            return _slice(self._file.get_tensor(name), intervals).contiguous()
        # Only the pieces of the first split dim become separate reads; the rest is cut in memory.
        shape = source.get_shape()
        split = next((d for d, pieces in enumerate(intervals) if list(pieces) != [(0, shape[d])]), 0)
        whole = (slice(None),) * split
        parts = [source[(*whole, slice(start, stop))] for start, stop in intervals[split] if start < stop]
        if not parts:
            empty = [sum(stop - start for start, stop in pieces) for pieces in intervals]
            dtype = getattr(torch, _SAFETENSORS_DTYPES[source.get_dtype()])
            return torch.empty(empty, dtype=dtype)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, split)
        rest = [[(0, joined.shape[split])] if d == split else list(pieces) for d, pieces in enumerate(intervals)]
        return _slice(joined, rest).contiguous()


def save_weights(path: Path, tensors: Sequence[Tensor], source: WeightSource) -> None:
    """Write the global tensors of `source` to a safetensors file. Raises BundleError on an unlike dtype or shape."""
    from safetensors.torch import save_file

    whole: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for tensor in tensors:
        value = source.read(tensor.name, [[(0, size)] for size in tensor.shape])
        found = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if found != (tensor.dtype, tensor.shape):
            raise BundleError(
                f"the manifest says {tensor.dtype} {tensor.shape}, the value is {found[0]} {found[1]}", tensor.name
            )
        # safetensors refuses tensors that share memory, and views that do not fill their storage.
        address = value.untyped_storage().data_ptr()
        if address in storages or value.untyped_storage().nbytes() != value.numel() * DTYPES[tensor.dtype][1]:
            value = value.clone()
        storages.add(address)
        whole[tensor.name] = value
    save_file(whole, str(path))


def _slice(value: torch.Tensor, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
    import torch

    for dim, pieces in enumerate(intervals):
        if list(pieces) == [(0, value.shape[dim])]:
            continue
        parts = [value.narrow(dim, start, stop - start) for start, stop in pieces if start < stop]
        if len(parts) == 1:
            value = parts[0]
        elif parts:
            value = torch.cat(parts, dim)
        else:
            value = value.narrow(dim, 0, 0)
    return value
