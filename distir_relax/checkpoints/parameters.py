"""Parameters of a model in files: safetensors, checkpoints of training runs, and of `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distir_relax.bundle import AVERAGED, FileWeights, model_files
from distir_relax.checkpoints.distributed_checkpoint import DistributedCheckpoint, is_distributed
from distir_relax.checkpoints.folder import Saved, is_checkpoint, latest
from distir_relax.errors import BundleError, CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredParameters:
    """Tensors by the model's names, and the files that they were read from.

    If they are `partial`, tensors that training does not change may be missing.
    """

    tensors: dict[str, torch.Tensor]
    files: Sequence[Path]
    partial: bool = False


def read_parameters(path: Path, names: Collection[str], averaged: bool = False) -> StoredParameters:
    """Read the tensors of a model which are called `names`.

    `path` is a safetensors file; a folder of them, as `save_pretrained` writes; a checkpoint of a training run, or a
    folder of those, of which the newest is read; or a folder of `torch.distributed.checkpoint`, where the names may
    have a common prefix, such as ``model.``. Of safetensors files all tensors are read. With `averaged`, weights of a
    checkpoint are their averages.

    Raises CheckpointError if there are no such files, or they cannot be read, and for averages that are not there.
    """
    if is_checkpoint(path):
        saved = latest(path)
        return StoredParameters(_of_run(saved, names, averaged), [saved.tensors.path], partial=True)
    if averaged:
        raise CheckpointError("expected a checkpoint of a training run, which may hold averages", str(path))
    if is_distributed(path):
        checkpoint = DistributedCheckpoint(path)
        prefix = common_prefix(names, checkpoint.shapes)
        tensors = checkpoint.read({n: prefix + n for n in names if prefix + n in checkpoint.shapes})
        return StoredParameters(tensors, checkpoint.files)
    try:
        files = [FileWeights(file, (), hint="save the file again") for file in model_files(path)]
        if not files:
            raise CheckpointError(
                "expected safetensors files or a checkpoint in the folder, found none", str(path),
                "of other formats, read the tensors and pass them by name",
            )  # fmt: skip
        tensors = {name: whole(file, name) for file in files for name in file.kinds}
        return StoredParameters(tensors, [file.path for file in files])
    except BundleError as wrong:
        raise CheckpointError(wrong.message, wrong.where, wrong.hint) from None


def common_prefix(names: Iterable[str], stored: Collection[str]) -> str:
    """Return the prefix with which most of `names` are stored; empty if none is stored with one."""
    counts: dict[str, int] = {}
    known = set(names)
    for name in stored:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in known:
                prefix = "".join(f"{part}." for part in parts[:start])
                counts[prefix] = counts.get(prefix, 0) + 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")


def whole(file: FileWeights, name: str) -> torch.Tensor:
    """Return a tensor of a safetensors file."""
    return file.read(name, [[(0, size)] for size in file.kinds[name][1]])


def names_in_state(saved: Saved, averaged: bool) -> dict[str, str]:
    """Return the model's names of tensors of a checkpoint, with their names there; of averages with `averaged`.

    Raises CheckpointError if the checkpoint has no names, or no averages.
    """
    kinds = saved.tensors.kinds
    if not saved.names:
        raise CheckpointError(
            "the checkpoint does not have the model's names", str(saved.path),
            "it was written by an earlier version: resume with this one, which writes them",
        )  # fmt: skip
    if averaged and not any(name.endswith(AVERAGED) for name in kinds):
        raise CheckpointError(
            "the checkpoint has no averages of weights", str(saved.path), "compile with averaging=dr.optim.EMA(0.999)"
        )
    return _averages(saved, saved.names, averaged)


def _averages(saved: Saved, names: Mapping[str, str], averaged: bool) -> dict[str, str]:
    kinds = saved.tensors.kinds
    suffixed = {value: f"{value}{AVERAGED}" for value in kinds if averaged and f"{value}{AVERAGED}" in kinds}
    return {name: suffixed.get(value, value) for name, value in names.items() if value in kinds}


def _of_run(saved: Saved, names: Collection[str], averaged: bool) -> dict[str, torch.Tensor]:
    # Parameters of a loss module, and buffers that a state dict does not have, have the program's names alone.
    others = _averages(saved, {name: name for name in names}, averaged)
    try:
        return {n: whole(saved.tensors, value) for n, value in {**others, **names_in_state(saved, averaged)}.items()}
    except BundleError as wrong:
        raise CheckpointError(wrong.message.replace("the weights", "the tensors"), wrong.where) from None
