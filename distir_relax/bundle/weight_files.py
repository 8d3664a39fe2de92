"""Weights that stay where they are: tensors of safetensors files outside of the bundle, which refers to them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle.manifest import Tensor, WeightFile
from distir_relax.bundle.weights import WeightSource
from distir_relax.bundle.weights_file import WIDENED, FileWeights
from distir_relax.errors import BundleError
from distir_relax.layout import Interval
from distir_relax.support import check_regular

if TYPE_CHECKING:
    import torch

_ELSEWHERE = "move the file back, or compile the model again; with --weights copy the bundle has a copy of its weights"
# Weights of another name than in the file are compared with so many tensors of the same shape.
_MOST_COMPARED = 4


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a bundle on disk. `files` are those that hold them, with their checksums; `by_name` has each one's."""

    files: Sequence[tuple[FileWeights, str]]
    by_name: Mapping[str, FileWeights]

    @property
    def identity(self) -> tuple[int, ...]:
        """Return the identity and state of all files, as `FileWeights.identity`."""
        return tuple(number for file, _ in self.files for number in file.identity)

    def check(self) -> None:
        """Hash all files. Raises BundleError if one was damaged, or changed."""
        for file, checksum in self.files:
            if file.checksum() != checksum:
                raise BundleError(
                    "the weights are damaged: their checksum is not the manifest's", str(file.path), file.hint
                )

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`. The result must not be written to."""
        return self.by_name.get(name, self.files[0][0]).read(name, intervals)


def open_weights(own: Path, checksum: str, tensors: Sequence[Tensor], files: Sequence[WeightFile]) -> StoredWeights:
    """Open the weights `tensors` of a bundle: `own` is its file of weights, `files` are those outside of it.

    Raises BundleError if a file is missing, truncated, or has another size, or does not contain its tensors.
    """
    folder = Path(os.path.realpath(own.parent))
    elsewhere = {name: file for file in files for name in file.tensors}
    first = FileWeights(own, [tensor for tensor in tensors if tensor.name not in elsewhere])
    opened, by_name = [(first, checksum)], {}
    for file in files:
        path = Path(os.path.normpath(folder / file.path))
        try:
            size = check_regular(path, BundleError, "the weights are missing")
        except BundleError as wrong:
            raise BundleError(wrong.message, wrong.where, _ELSEWHERE) from None
        if size != file.size:
            raise BundleError(
                f"the weights have changed: expected {file.size:,} bytes, found {size:,}", str(path), _ELSEWHERE
            )
        members = [tensor for tensor in tensors if tensor.name in file.tensors]
        weights = FileWeights(path, members, file.tensors, _ELSEWHERE)
        opened.append((weights, file.checksum))
        by_name.update(dict.fromkeys(file.tensors, weights))
    return StoredWeights(opened, by_name)


def find_weights(
    tensors: Sequence[Tensor], source: WeightSource, files: Sequence[Path], bundle: Path
) -> tuple[WeightFile, ...]:
    """Return those of `files` that hold weights of a bundle, bit by bit or in a shorter float, for its manifest.

    `bundle` is the bundle's folder. Files that are gone hold none. Raises BundleError for one that is damaged.
    """
    opened = {path: FileWeights(path, ()) for path in files if path.is_file()}
    places: dict[Path, dict[str, str]] = {path: {} for path in opened}
    for tensor in tensors:
        place = next(_places(tensor, source, opened), None)
        if place is not None:
            places[place[0]][tensor.name] = place[1]
    start = os.path.realpath(bundle)
    return tuple(
        WeightFile(os.path.relpath(os.path.abspath(path), start), opened[path].size, opened[path].checksum(), names)
        for path, names in places.items()
        if names
    )


def _places(tensor: Tensor, source: WeightSource, opened: Mapping[Path, FileWeights]) -> Iterator[tuple[Path, str]]:
    """Yield the files and names of equal tensors: those of the same name, or else of the same shape."""
    fitting = [
        (path, key)
        for path, weights in opened.items()
        for key, (dtype, shape) in weights.kinds.items()
        if shape == tensor.shape and (dtype == tensor.dtype or dtype in WIDENED.get(tensor.dtype, ()))
    ]
    named = [(path, key) for path, key in fitting if _is_name(key, tensor.name)]
    candidates = named or (fitting if len(fitting) <= _MOST_COMPARED else [])
    if not candidates:
        return
    import torch

    whole = [[(0, size)] for size in tensor.shape]
    expected = source.read(tensor.name, whole)
    for path, key in candidates:
        found = opened[path].read(key, whole).to(expected.dtype)
        if torch.equal(_bits(found), _bits(expected)):
            yield path, key


def _is_name(key: str, name: str) -> bool:
    """Return whether two names differ at most by a prefix: some files lack that of the model's class."""
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")


def _bits(value: Any) -> Any:
    import torch

    return value.reshape(-1).view(torch.uint8)
