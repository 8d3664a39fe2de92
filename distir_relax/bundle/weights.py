"""Weight sources of a bundle, and writing of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distir_relax.bundle.manifest import Tensor
from distir_relax.errors import BundleError
from distir_relax.layout import DTYPES, Interval

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.safetensors"


class WeightSource(Protocol):
    """Reader of pieces of global tensors."""

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return the piece of `name` at `intervals[dim]`, pieces of a dim concatenated in order; contiguous.

        Raises BundleError when there is no such tensor.
        """
        ...


class TensorWeights:
    """Weights held in memory as global tensors. A whole tensor is returned without a copy."""

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
        return cut_out(tensor, intervals).contiguous()


def save_weights(path: Path, tensors: Sequence[Tensor], source: WeightSource) -> None:
    """Write the global tensors of `source` to a safetensors file. Raises BundleError on another dtype or shape."""
    from safetensors.torch import save_file

    values: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for tensor in tensors:
        value = source.read(tensor.name, [[(0, size)] for size in tensor.shape])
        actual = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if actual != (tensor.dtype, tensor.shape):
            raise BundleError(
                f"the manifest says {tensor.dtype} {tensor.shape}, the value is {actual[0]} {actual[1]}", tensor.name
            )
        # safetensors refuses tensors that share memory, and views that do not fill their storage.
        address = value.untyped_storage().data_ptr()
        if address in storages or value.untyped_storage().nbytes() != value.numel() * DTYPES[tensor.dtype][1]:
            value = value.clone()
        storages.add(address)
        values[tensor.name] = value
    save_file(values, str(path))


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
