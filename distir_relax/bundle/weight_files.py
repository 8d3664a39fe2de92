"""Weights that stay where they are: tensors of safetensors files outside of the bundle, which refers to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distir_relax.bundle.manifest import Tensor, WeightFile
from distir_relax.bundle.weights import TensorWeights, WeightSource
from distir_relax.bundle.weights_file import WIDENED, FileTensor, FileWeights
from distir_relax.errors import BundleError
from distir_relax.layout import Interval
from distir_relax.support import Fields, check_name, check_regular, parse_json, read_bytes
from distir_relax.support.file_slices import Slice

if TYPE_CHECKING:
    import torch

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZED = "the bundle has weights of 8 or 4 bits, and these are not: compile their model with --precision"
_OTHER = "give weights of a model with the same config as the compiled one, or compile this model"
_ELSEWHERE = "move the file back, or compile the model again; with --weights copy the bundle has a copy of its weights"


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a bundle on disk.

    `files` are those that hold them, with their checksums, the bundle's own first; `elsewhere` are the weights of
    others. `others` are the files of `path`, whose weights take the place of the bundle's: no checksum is known.
    """

    files: Sequence[tuple[FileWeights, str]]
    elsewhere: Mapping[str, FileTensor]
    others: Sequence[FileWeights] = ()
    path: Path | None = None

    @property
    def identity(self) -> tuple[int, ...]:
        """Return the identity and state of all files, as `FileWeights.identity`."""
        files = (*(file for file, _ in self.files), *self.others)
        return tuple(number for file in files for number in file.identity)

    def check(self) -> None:
        """Hash all files. Raises BundleError if one was damaged, or changed."""
        for file, checksum in self.files:
            if file.checksum() != checksum:
                raise BundleError(
                    "the weights are damaged: their checksum is not the manifest's", str(file.path), file.hint
                )

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`. The result must not be written to."""
        tensor = self.elsewhere.get(name)
        return self.files[0][0].read(name, intervals) if tensor is None else tensor.read(intervals)

    def slices(self, name: str, intervals: Sequence[Sequence[Interval]]) -> tuple[FileWeights, list[Slice]]:
        """Return the file that has a weight, and its bytes that `read` needs."""
        tensor = self.elsewhere.get(name)
        file, key = (self.files[0][0], name) if tensor is None else (tensor.file, tensor.key)
        return file, file.slices(key, intervals)

    def other_checksums(self) -> list[str]:
        """Hash the files of other weights, which takes as long as reading them."""
        return [file.checksum() for file in self.others]


def model_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model: `path`, or those that transformers reads in the folder `path`.

    A folder without those may have any, or none. Raises BundleError if there is no such file or folder, and for a
    damaged index.
    """
    if not path.is_dir():
        try:
            check_regular(path, BundleError, "the weights are missing")
        except BundleError as wrong:
            raise BundleError(wrong.message, wrong.where, "give a safetensors file, or a folder of them") from None
        return [path]
    index = path / _INDEX
    if (path / _FILE).is_file():
        return [path / _FILE]
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    table = parse_json(read_bytes(index, BundleError), BundleError, str(index))
    names = sorted(set(Fields.of(table, BundleError, str(index)).by_name("weight_map").values()))
    for name in names:
        check_name(name, BundleError, str(index))
    # A file may be a link: the folders of huggingface_hub have links alone.
    return [path / name for name in names]


def open_weights(
    own: Path, checksum: str, tensors: Sequence[Tensor], files: Sequence[WeightFile], parameters: Mapping[str, str],
    other: Path | None = None,
) -> StoredWeights:  # fmt: skip
    """Open the weights `tensors` of a bundle: `own` is its file of weights, `files` are those outside of it.

    With `other`, a safetensors file or a folder of them, its tensors take the place of `parameters`, which have their
    names in the model's files; the bundle's are not opened. Raises BundleError if a file is missing, truncated, or has
    another size, or does not contain its tensors; and for a tensor of `other` of another shape or dtype.
    """
    elsewhere = {name for file in files for name in file.tensors}
    first = FileWeights(own, [tensor for tensor in tensors if tensor.name not in elsewhere])
    if other is not None:
        by_name = _tensors_of(other, [tensor for tensor in tensors if tensor.name in parameters], parameters)
        others = {id(tensor.file): tensor.file for tensor in by_name.values()}
        return StoredWeights([(first, checksum)], by_name, tuple(others.values()), other)
    folder = Path(os.path.realpath(own.parent))
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
        by_name |= {tensor.name: FileTensor(weights, file.tensors[tensor.name], tensor.dtype) for tensor in members}
    return StoredWeights(opened, by_name)


def _tensors_of(other: Path, tensors: Sequence[Tensor], parameters: Mapping[str, str]) -> dict[str, FileTensor]:
    """Return the tensors of other files that take the place of these, by the program's names."""
    files = [FileWeights(path, (), hint=_OTHER) for path in model_files(other)]
    if not files:
        raise BundleError("expected safetensors files in the folder, found none", str(other), _OTHER)
    places = {key: file for file in files for key in file.kinds}
    found: dict[str, FileTensor] = {}
    for tensor in tensors:
        # The file of a bundle has the program's names.
        key = next((key for key in (parameters[tensor.name], tensor.name) if key in places), None)
        if key is None:
            hint = _QUANTIZED if _is_quantized(parameters[tensor.name], places) else _OTHER
            raise BundleError(f"expected the weight {parameters[tensor.name]!r}, found none", str(other), hint)
        dtype, shape = places[key].kinds[key]
        if shape != tensor.shape or dtype not in (tensor.dtype, *WIDENED.get(tensor.dtype, ())):
            raise BundleError(
                f"expected {tensor.dtype} {tensor.shape} for the weight {key!r}, found {dtype} {shape}",
                str(places[key].path), _OTHER,
            )  # fmt: skip
        found[tensor.name] = FileTensor(places[key], key, tensor.dtype)
    return found


def _is_quantized(name: str, found: Collection[str]) -> bool:
    """Return whether a missing weight is part of one of 8 or 4 bits, which the files have as it was before."""
    weight, _, part = name.rpartition(".")
    return part in ("values", "scales", "minimums") and any(weight in key for key in found)


def stored_elsewhere(tensors: Sequence[Tensor], source: WeightSource, bundle: Path) -> tuple[WeightFile, ...]:
    """Return the safetensors files that hold weights of a bundle, for its manifest.

    They are the files of the deferred tensors of `source`. `bundle` is the bundle's folder. Raises BundleError for a
    file that was written to after it was opened.
    """
    if not isinstance(source, TensorWeights):
        return ()
    names: dict[FileWeights, dict[str, str]] = {}
    for tensor in tensors:
        place = source.source(tensor.name)
        if isinstance(place, FileTensor) and place.dtype == tensor.dtype and not place.is_temporary:
            names.setdefault(place.file, {})[tensor.name] = place.key
    start = os.path.realpath(bundle)
    return tuple(
        WeightFile(os.path.relpath(os.path.abspath(file.path), start), file.size, file.checksum(), tensors)
        for file, tensors in sorted(names.items(), key=lambda item: item[0].path)
    )
