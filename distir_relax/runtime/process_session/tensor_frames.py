"""Tensors in frames: small ones as bytes, large ones in shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle import Tensor
from distir_relax.layout import DTYPES
from distir_relax.runtime.arrays import bytes_of, dtype_name, torch_dtype
from distir_relax.runtime.process_session.shared_memory import Segment, aligned
from distir_relax.support.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    import torch

Descriptor: TypeAlias = list[Any]
"""Name, dtype, shape, whether it is in shared memory, and offset there or in the payload."""

_LARGE = 1 << 16


def pack(tensors: Mapping[str, torch.Tensor], segment: Segment | None) -> tuple[list[Descriptor], bytes]:
    """Return the descriptors of tensors, and the payload; large ones are copied into `segment` if they fit."""
    descriptors: list[Descriptor] = []
    parts: list[bytes] = []
    inline = shared = 0
    for name, x in tensors.items():
        size = bytes_of(x)
        is_shared = segment is not None and size > _LARGE and shared + size <= segment.size
        descriptors.append([name, dtype_name(x.dtype), list(x.shape), is_shared, shared if is_shared else inline])
        if segment is not None and is_shared:
            segment.tensor(shared, dtype_name(x.dtype), x.shape).copy_(x)
            shared += aligned(size)
        else:
            parts.append(_bytes(x))
            inline += size
    return descriptors, b"".join(parts)


def unpack(
    descriptors: Sequence[Descriptor], payload: bytes, segment: Segment | None, copy: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors of a frame by name; those in shared memory are views of it, unless `copy`."""
    import torch

    tensors = {}
    for name, dtype, shape, is_shared, offset in descriptors:
        if is_shared:
            assert segment is not None, "a tensor in shared memory"
            x = segment.tensor(offset, dtype, shape)
            tensors[name] = x.clone() if copy else x
        else:
            x = torch.empty(shape, dtype=torch_dtype(dtype))
            if size := bytes_of(x):
                source = torch.frombuffer(bytearray(payload[offset : offset + size]), dtype=x.dtype)
                x = source.view(shape)
            tensors[name] = x
    return tensors


def shared_size(sizes: Iterable[int]) -> int:
    """Return the bytes of a segment for tensors of these sizes, in bytes, of which the small ones are not in it."""
    return sum(aligned(size) for size in sizes if size > _LARGE)


def size_of_value(tensor: Tensor) -> int:
    """Return the bytes of a global tensor of a manifest whose sizes are numbers."""
    count = DTYPES[tensor.dtype][1]
    for size in tensor.shape:
        count *= size
    return count


def _bytes(x: torch.Tensor) -> bytes:
    content: bytes = tensor_bytes(x).numpy().tobytes()
    return content
