"""Tensors of a folder that `torch.distributed.checkpoint` has written, joined from the shards of its ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import CheckpointError
from distir_relax.support import read_bytes

if TYPE_CHECKING:
    import torch

_METADATA = ".metadata"
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_SAVED = "torch.distributed.checkpoint"
_CLASSES = {
    *((f"{_SAVED}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_SAVED}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"),
    *(("torch", name) for name in _DTYPES), ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")),
}  # fmt: skip


def is_distributed(folder: Path) -> bool:
    """Return whether a folder was written by `torch.distributed.checkpoint`."""
    return (folder / _METADATA).is_file()


class DistributedCheckpoint:
    """The tensors of such a folder. Raises CheckpointError if it cannot be read, or its metadata hold other classes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        content = read_bytes(folder / _METADATA, CheckpointError)
        try:
            self._metadata: Any = _Unpickler(io.BytesIO(content)).load()
            entries = self._metadata.state_dict_metadata.items()
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(entry.size) for name, entry in entries if hasattr(entry, "properties")
            }
            """The shape of each tensor, by its name: nested keys are joined by dots."""
        except CheckpointError as wrong:
            raise CheckpointError(wrong.message, str(folder / _METADATA)) from None
        except Exception as error:  # a pickle may raise any
            raise self._damaged(error) from None

    @property
    def files(self) -> list[Path]:
        """The files of the checkpoint: the metadata, and those of the ranks."""
        return [self._folder / _METADATA, *sorted(self._folder.glob("*.distcp"))]

    def read(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return tensors by the keys of `names`, whose values are the names in the checkpoint."""
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        metadata = self._metadata

        class Reader(FileSystemReader):
            """A reader of metadata that were read already."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                """Return the metadata."""
                return metadata

        kinds = metadata.state_dict_metadata
        try:
            tensors = {s: torch.empty(kinds[s].size, dtype=kinds[s].properties.dtype) for s in names.values()}
            load(tensors, storage_reader=Reader(str(self._folder)), no_dist=True)
        except CheckpointException as wrong:
            raise self._damaged(next((error for error, _ in wrong.failures.values()), wrong)) from None
        except Exception as error:  # whatever the parts of the files raise
            raise self._damaged(error) from None
        return {name: tensors[stored] for name, stored in names.items()}

    def _damaged(self, error: BaseException) -> CheckpointError:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return CheckpointError(f"the distributed checkpoint cannot be read: {reason}", str(self._folder))


class _Unpickler(pickle.Unpickler):
    """A reader of metadata, which are a pickle: only the classes that torch writes are loaded."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _CLASSES:
            raise CheckpointError(f"expected the metadata of torch.distributed.checkpoint, found {module}.{name}")
        return super().find_class(module, name)


def _member(owner: object, name: str) -> Enum:
    """Return a member of an enum, which Python 3.11.0 to 3.11.3 writes as the attribute of a class."""
    if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
        raise CheckpointError(f"expected a member of an enum, found the attribute {name!r} of {owner!r}")
    return owner[name]
