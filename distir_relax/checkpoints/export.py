"""Export of trained weights from a checkpoint, by the model's names: a safetensors file, or a pretrained folder."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, FileWeights, Tensor, WeightSource, model_files, save_weights
from distir_relax.checkpoints.folder import Saved, remove
from distir_relax.checkpoints.parameters import names_in_state
from distir_relax.errors import BundleError, CheckpointError
from distir_relax.layout import Interval
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch

# Copies of the weights as they were, in several formats, are not copied.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def export_weights(
    saved: Saved, target: Path, bundle: Bundle | None = None, averaged: bool = False, trained: bool = False
) -> int:
    """Write the weights of a checkpoint to a safetensors file, by the model's names; return their number.

    Tied weights are written under each of their names. Those that training does not change are read from the
    `bundle`; with `trained` they are left out. With `averaged`, trained weights are their averages. Raises
    CheckpointError for weights that are neither in the checkpoint nor in the bundle, and if the file cannot be written;
    there is no partial file then.
    """
    places = _in_checkpoint(saved, averaged)
    frozen = {} if trained else {name: value for name, value in saved.names.items() if name not in places}
    if frozen and bundle is None:
        raise CheckpointError(
            f"the checkpoint does not have {listed(list(frozen), 3)}, which training does not change", str(saved.path),
            "they are in the bundle that was trained: give it with --bundle, or leave them out with --trained",
        )  # fmt: skip
    if frozen and bundle is not None:
        places |= _in_bundle(frozen, bundle)
    with _draft(target) as draft:
        _write(draft, places)
    return len(places)


def export_pretrained(saved: Saved, pretrained: Path, target: Path, averaged: bool = False) -> int:
    """Write a copy of a `save_pretrained` folder with the trained weights of a checkpoint; return their number.

    They have the dtypes that they have in the folder; weights that the checkpoint does not have stay as they are. With
    `averaged` they are averages. Raises CheckpointError for a folder that lacks a trained weight, or has it in another
    shape, for a target that exists, and if it cannot be written.
    """
    trained = _in_checkpoint(saved, averaged)
    files = [FileWeights(file, (), hint="save the model again") for file in model_files(pretrained)]
    if not files or not pretrained.is_dir():
        raise CheckpointError("expected a folder of safetensors files, as save_pretrained writes it", str(pretrained))
    stored = {name: file for file in files for name in file.kinds}
    values = {saved.names[name] for name in stored if name in trained}
    if missing := [name for name in trained if saved.names[name] not in values]:
        raise CheckpointError(
            f"expected the weights {listed(missing, 3)} in the folder, found none", str(pretrained),
            "give the folder of the model that was trained; if transformers renames its weights, write a file without "
            "--pretrained, and use load_state_dict and save_pretrained",
        )  # fmt: skip
    for name, file in stored.items():
        shape = file.kinds[name][1]
        if name in trained and trained[name].tensor.shape != shape:
            expected = trained[name].tensor.shape
            raise CheckpointError(f"expected {expected} for the weight {name!r}, found {shape}", str(file.path))
    if target.exists():
        raise CheckpointError("expected a new folder, found an existing one", str(target), "choose another --out")
    with _draft(target) as draft:
        shutil.copytree(pretrained, draft, ignore=shutil.ignore_patterns(*_WEIGHTS))
        for file in files:
            _write(draft / file.path.name, {
                name: trained[name].cast(dtype) if name in trained else _Place(Tensor(name, dtype, shape), file)
                for name, (dtype, shape) in file.kinds.items()
            })  # fmt: skip
    return len(values)


class _Place:
    """A tensor of a source, which is called `tensor.name` there, and converted to its dtype."""

    def __init__(self, tensor: Tensor, source: WeightSource) -> None:
        self.tensor, self._source = tensor, source

    def read(self, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """Return a piece of the tensor."""
        import torch

        piece = self._source.read(self.tensor.name, intervals)
        return piece.to(getattr(torch, self.tensor.dtype))

    def cast(self, dtype: str) -> _Place:
        """Return the tensor in the dtype of a file. Raises CheckpointError unless both are floats, or equal."""
        if dtype != self.tensor.dtype and not {dtype, self.tensor.dtype} <= {*_FLOATS}:
            raise CheckpointError(f"expected {self.tensor.dtype} in the folder, found {dtype}", self.tensor.name)
        return _Place(Tensor(self.tensor.name, dtype, self.tensor.shape), self._source)


class _Places:
    """A weight source of tensors of several sources."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`."""
        return self._places[name].read(intervals)


def _in_checkpoint(saved: Saved, averaged: bool) -> dict[str, _Place]:
    kinds = saved.tensors.kinds
    return {
        name: _Place(Tensor(value, *kinds[value]), saved.tensors)
        for name, value in names_in_state(saved, averaged).items()
    }


def _in_bundle(names: Mapping[str, str], bundle: Bundle) -> dict[str, _Place]:
    weights = {tensor.name: tensor for tensor in bundle.manifest.weights}
    if missing := [name for name, value in names.items() if value not in weights]:
        raise CheckpointError(
            f"expected the weights {listed(missing, 3)} in the bundle, found none", str(bundle.path),
            "give the bundle that was trained",
        )  # fmt: skip
    return {
        name: _Place(Tensor(value, weights[value].dtype, weights[value].shape), bundle.weights)
        for name, value in names.items()
    }


def _write(path: Path, places: Mapping[str, _Place]) -> None:
    tensors = [Tensor(name, place.tensor.dtype, place.tensor.shape) for name, place in places.items()]
    save_weights(path, tensors, _Places(places))


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield a path beside the target, which takes its place when the block ends. Raises CheckpointError."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        draft.replace(target)
    except OSError as wrong:
        raise CheckpointError(f"the weights cannot be written: {wrong.strerror or wrong}", str(target)) from None
    except BundleError as wrong:
        raise CheckpointError(wrong.message, wrong.where) from None
    finally:
        if draft.is_file():
            draft.unlink()
        else:
            remove(draft)
