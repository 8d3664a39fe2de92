"""Weight sources of a bundle, and writing of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from distir_relax.bundle.manifest import Tensor
from distir_relax.errors import BundleError
from distir_relax.layout import DTYPES, Interval
from distir_relax.support.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.safetensors"
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Dtype names of the format safetensors, and ours."""
_SHORT = {long: short for short, long in SAFETENSORS_DTYPES.items()}


class WeightSource(Protocol):
    """Reader of pieces of global tensors."""

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return the piece of `name` at `intervals[dim]`, pieces of a dim concatenated in order; contiguous.

        Raises BundleError when there is no such tensor.
        """
        ...


class TensorWeights:
    """Weights as global tensors. One in memory is returned whole without a copy, a deferred one is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`. The result must not be written to."""
        from distir_relax.support.deferred_tensor import DeferredTensor

        if name not in self._tensors:
            raise BundleError("the bundle has no such weight", name)
        tensor = self._tensors[name].detach()
        if isinstance(tensor, DeferredTensor):
            if tensor.source is not None:
                piece: torch.Tensor = tensor.source.read(intervals)
                return piece
            # A view would hold the whole tensor.
            whole = tensor.read()
            piece = cut_out(whole, intervals).contiguous()
            return piece if piece.numel() == whole.numel() else piece.clone()
        if tensor.is_meta:
            raise BundleError(
                "the weight has no data: it is on the meta device",
                name,
                "give compile a checkpoint that holds it: compile(..., checkpoint='model.safetensors')",
            )
        return cut_out(tensor, intervals).contiguous()

    def source(self, name: str) -> Any:
        """Return where a deferred weight is stored as it is, a `FileTensor`; None for others."""
        return getattr(self._tensors[name], "source", None)

    def name_in_file(self, name: str) -> str:
        """Return the name that a weight has in the model's files."""
        source = self.source(name)
        return name if source is None else str(source.key)


class SharedWeights:
    """Weights of which those called `shared` are another bundle's."""

    def __init__(self, own: WeightSource, other: WeightSource, shared: Collection[str]) -> None:
        self.own, self._other, self._shared = own, other, shared

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`."""
        return (self._other if name in self._shared else self.own).read(name, intervals)


OnWritten: TypeAlias = "Callable[[int, int], None]"
"""A callback for the bytes of weights that were written, and those of all."""


def save_weights(
    path: Path, tensors: Sequence[Tensor], source: WeightSource, on_written: OnWritten | None = None
) -> None:
    """Write the global tensors of `source` to a safetensors file, one after the other.

    They are read in their order, not in that of the file: a source may compute several tensors at once, of which the
    file has those of wider dtypes first. Raises BundleError on another dtype or shape.
    """

    header, starts, size = safetensors_header(tensors)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            value = source.read(tensor.name, [[(0, n)] for n in tensor.shape])
            actual = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
            if actual != (tensor.dtype, tensor.shape):
                raise BundleError(
                    f"the manifest says {tensor.dtype} {tensor.shape}, the value is {actual[0]} {actual[1]}",
                    tensor.name,
                )
            content: Any = tensor_bytes(value).numpy()
            file.seek(starts[tensor.name])
            file.write(content.data)
            written += content.nbytes
            if on_written is not None:
                on_written(written, size - len(header))
            # The next one is read without it.
            del value, content


def safetensors_header(tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file of tensors, the offset of each tensor in the file, and the size of the file."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    # The widest dtypes first, so that each tensor is aligned.
    for tensor in sorted(tensors, key=lambda t: -DTYPES[t.dtype][1]):
        end = position + math.prod(tensor.shape) * DTYPES[tensor.dtype][1]
        table[tensor.name] = {
            "dtype": _SHORT[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end],
        }  # fmt: skip
        starts[tensor.name], position = position, end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + position


def cut_out(value: torch.Tensor, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
    """Return the piece of a tensor at `intervals[dim]`, pieces of a dim concatenated: a view if possible."""
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
