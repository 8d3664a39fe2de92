"""Lazy loading of a meta-device model's weights from a checkpoint of safetensors files.

Tensors are read one at a time, when a bundle is written or a plan first runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported_model import Imported
from distir_relax.support import check_regular
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch


def with_checkpoint(imported: Imported, path: str | Path) -> Imported:
    """Return the imported model with the data of its meta-device tensors from a checkpoint.

    `path` is a ``.safetensors`` file, or a folder of them. A tensor is looked up by each of the model's names for it,
    and is cast to the model's dtype. Raises `ImportModelError` for a checkpoint that cannot be read, that lacks one of
    the tensors, or holds one of another shape.
    """
    from distir_relax.support.deferred_tensor import DeferredTensor

    entries = _tensors_in(Path(path))
    names: dict[str, list[str]] = {}
    for name, value in imported.names.items():
        names.setdefault(value, []).append(name)
    sources: dict[str, tuple[Path, str]] = {}
    missing = []
    for value, tensor in imported.tensors.items():
        if not tensor.is_meta:
            continue
        key = next((n for n in (*names.get(value, ()), value) if n in entries), None)
        if key is None:
            missing.append(value)
            continue
        file, shape = entries[key]
        if shape != tuple(tensor.shape):
            raise ImportModelError(f"expected {tuple(tensor.shape)} for {key!r}, found {shape}", str(file))
        sources[value] = file, key
    if missing:
        raise ImportModelError(
            f"the checkpoint has no data for {listed(missing, 3)}",
            str(path),
            f"it holds names such as {', '.join(list(entries)[:3])}; tensors that are not weights must have data in "
            "the model: create it inside `with distir_relax.empty_weights():`, which leaves buffers in memory",
        )
    read = {
        value: DeferredTensor(imported.tensors[value], partial(_read, file, key, imported.tensors[value].dtype))
        for value, (file, key) in sources.items()
    }
    return replace(imported, tensors={**imported.tensors, **read})


def read_tensors(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read those of the named tensors that a checkpoint holds. Raise `ImportModelError` if it cannot be read."""
    entries = _tensors_in(path)
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name in entries:
            with _open(entries[name][0]) as file:
                tensors[name] = file.get_tensor(name).clone()
    return tensors


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: `path`, or those in the folder `path`. Raises `ImportModelError` for none."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except OSError as error:
        raise ImportModelError(f"cannot be read: {error.strerror}", str(path)) from None
    if not files:
        raise ImportModelError("expected safetensors files in the checkpoint's folder, found none", str(path))
    return files


def _read(path: Path, key: str, dtype: torch.dtype) -> torch.Tensor:
    with _open(path) as file:
        data: torch.Tensor = file.get_tensor(key)
    # Copy: the file is memory-mapped, and may be truncated while a plan runs.
    return data.to(dtype, copy=True)


def _tensors_in(path: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of each tensor of a checkpoint."""
    entries: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in checkpoint_files(path):
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                entries[name] = file, tuple(opened.get_slice(name).get_shape())
    return entries


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file; its errors, also during use, become `ImportModelError`."""
    from safetensors import SafetensorError, safe_open

    check_regular(path, ImportModelError, "there is no such checkpoint")
    open_untyped: Any = safe_open
    try:
        with open_untyped(str(path), framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ImportModelError(f"not a safetensors file: {error}", str(path)) from None
