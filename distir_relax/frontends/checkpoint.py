"""Weights of a model that was built without them, from a checkpoint of safetensors files.

They are read when a bundle is written or a plan first runs, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported_model import Imported
from distir_relax.support import check_regular
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch


def with_checkpoint(imported: Imported, path: str | Path) -> Imported:
    """The model read in, whose tensors on the meta device have the data that a checkpoint holds under their names.

    `path` is a ``.safetensors`` file, or a folder of them. A tensor is found by any of the model's names for it, and is
    cast to the model's dtype. Raises `ImportModelError` for a checkpoint that cannot be read, that lacks one of the
    tensors, or holds one of another shape.
    """
    held = _tensors_in(Path(path))
    names: dict[str, list[str]] = {}
    for name, value in imported.names.items():
        names.setdefault(value, []).append(name)
    found: dict[str, tuple[Path, str]] = {}
    missing = []
    for value, tensor in imported.tensors.items():
        if not tensor.is_meta:
            continue
        known = next((n for n in (*names.get(value, ()), value) if n in held), None)
        if known is None:
            missing.append(value)
            continue
        file, shape = held[known]
        if shape != tuple(tensor.shape):
            raise ImportModelError(f"expected {tuple(tensor.shape)} for {known!r}, found {shape}", str(file))
        found[value] = file, known
    if missing:
        raise ImportModelError(
            f"the checkpoint has no data for {listed(missing, 3)}",
            str(path),
            f"it holds names such as {', '.join(list(held)[:3])}; what is no weight must have data in the model "
            "itself: make the model inside `with distir_relax.empty_weights():`, which leaves buffers in memory",
        )
    return replace(imported, tensors=_Checkpointed(imported.tensors, found))


def read_tensors(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Those of the named tensors that a checkpoint holds. Raises `ImportModelError` for one that cannot be read."""
    held = _tensors_in(path)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if name in held:
            with _opened(held[name][0]) as file:
                found[name] = file.get_tensor(name).clone()
    return found


class _Checkpointed(Mapping[str, "torch.Tensor"]):
    """Tensors by name, of which some are read from files each time they are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], found: Mapping[str, tuple[Path, str]]) -> None:
        self._tensors, self._found = tensors, found

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._found:
            return self._tensors[name]
        path, known = self._found[name]
        with _opened(path) as file:
            data: torch.Tensor = file.get_tensor(known)
        # A copy: the file is mapped, and may be truncated while a plan runs.
        return data.to(self._tensors[name].dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _tensors_in(path: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """The file and the shape of each tensor of a checkpoint."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except OSError as error:
        raise ImportModelError(f"cannot be read: {error.strerror}", str(path)) from None
    if not files:
        raise ImportModelError("expected safetensors files in the checkpoint's folder, found none", str(path))
    held: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                held[name] = file, tuple(opened.get_slice(name).get_shape())
    return held


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, open; what it raises while it is used is an `ImportModelError` too."""
    from safetensors import SafetensorError, safe_open

    check_regular(path, ImportModelError, "there is no such checkpoint")
    open_untyped: Any = safe_open
    try:
        with open_untyped(str(path), framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ImportModelError(f"not a safetensors file: {error}", str(path)) from None
