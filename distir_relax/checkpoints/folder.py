"""Checkpoint folder of a run: atomic checkpoints, retention of the newest, and pointers to the last and the best.

::

    ck/latest                            step-00000300
    ck/best                              step-00000200
    ck/step-00000200/state.safetensors   all tensors that the program updates, global, by name
    ck/step-00000200/position.json       position of the run
    ck/step-00000300/...

A checkpoint is written to a folder whose name begins with a dot, which is renamed when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distir_relax.bundle import FileWeights
from distir_relax.checkpoints.position import Position
from distir_relax.errors import BundleError, CheckpointError
from distir_relax.support import Fields, parse_json, read_bytes

STATE_FILE = "state.safetensors"
_POSITION_FILE = "position.json"
_LATEST_FILE = "latest"
_BEST_FILE = "best"
_NAME = re.compile(r"step-(\d{8,18})")
_FORMAT = 3
_AGAIN = "choose an older checkpoint of the folder, or begin anew"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its folder, position, and tensors, of which a rank reads its own shards."""

    path: Path
    position: Position
    tensors: FileWeights
    names: Mapping[str, str] = field(default_factory=dict)
    """The model's names of its parameters and buffers, and their names in the program, of which some may be frozen."""


def begin(folder: Path, step: int) -> Path:
    """Create a draft folder for the checkpoint of a step; drafts of interrupted runs are removed.

    Raises CheckpointError if it cannot be created.
    """
    draft = folder / f".{_name(step)}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(".step-*"):
            remove(old)
        for name in (_LATEST_FILE, _BEST_FILE):
            for pointer in folder.glob(f".{name}.*"):
                pointer.unlink(missing_ok=True)
        draft.mkdir()
    except OSError as wrong:
        raise _unwritable(folder, wrong) from None
    return draft


def finish(
    draft: Path, position: Position, keep: int, is_best: bool = False, names: Mapping[str, str] | None = None
) -> Path:
    """Publish a draft that contains all tensors; of older checkpoints only the newest `keep - 1` stay, and the best.

    Checkpoints of later steps, of a run that went back to an earlier one, are removed. `names` maps the model's names
    of its tensors to those of the program. Raises CheckpointError if it cannot be written; existing checkpoints are
    intact then.
    """
    folder = draft.parent
    target = folder / _name(position.step)
    try:
        text = json.dumps({"format": _FORMAT, **position.to_json(), "names": dict(names or {})}, indent=1) + "\n"
        _write(draft / _POSITION_FILE, text)
        _sync(draft)
        if target.exists():
            # A folder cannot be renamed over a non-empty one: move the old checkpoint of the same step away.
            target.rename(draft.with_name(draft.name + ".old"))
        draft.rename(target)
        _sync(folder)
        for name in (_LATEST_FILE, *([_BEST_FILE] if is_best else [])):
            pointer = folder / f".{name}.{secrets.token_hex(4)}"
            _write(pointer, target.name + "\n")
            pointer.replace(folder / name)
        _sync(folder)
        so_far = [_name(step) for step in saved_steps(folder) if step <= position.step]
        kept = {*so_far[-max(1, keep) :], *({_pointed(folder, _BEST_FILE)} & set(so_far))}
        for old in [*folder.glob(".step-*.old"), *(folder / name for name in checkpoint_names(folder))]:
            if old.name not in kept:
                remove(old)
    except OSError as wrong:
        raise _unwritable(folder, wrong) from None
    return target


def remove(path: Path) -> None:
    """Remove a draft or a checkpoint, if it exists."""
    shutil.rmtree(path, ignore_errors=True)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in ascending order."""
    with contextlib.suppress(OSError):
        matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)
    return []


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest first."""
    return [_name(step) for step in reversed(saved_steps(folder))]


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or has checkpoints."""
    return any((folder / name).is_file() for name in (_POSITION_FILE, _LATEST_FILE)) or bool(saved_steps(folder))


def latest(folder: Path) -> Saved:
    """Return the newest checkpoint of a folder, or the folder itself if it is one.

    Raises CheckpointError otherwise.
    """
    if (folder / _POSITION_FILE).is_file():
        return _read(folder)
    if not folder.is_dir():
        raise CheckpointError("there is no such folder of checkpoints", str(folder))
    if name := _pointed(folder, _LATEST_FILE):
        return _read(folder / name)
    if not (steps := saved_steps(folder)):
        raise CheckpointError("there is no checkpoint in this folder", str(folder))
    return _read(folder / _name(steps[-1]))


def best(folder: Path) -> Saved | None:
    """Return the best checkpoint of a folder, or None if none is marked. Raises CheckpointError if it is damaged."""
    name = _pointed(folder, _BEST_FILE)
    return _read(folder / name) if name else None


def _pointed(folder: Path, pointer: str) -> str:
    """Return the name of the checkpoint in a pointer's file; empty if there is none."""
    name = ""
    with contextlib.suppress(CheckpointError):
        name = read_bytes(folder / pointer, CheckpointError, 4096).decode("utf-8", "replace").strip()
    # A run that ended between two renames has left the name of the previous checkpoint, which may be gone.
    return name if _NAME.fullmatch(name) and (folder / name).is_dir() else ""


def _read(path: Path) -> Saved:
    file = path / _POSITION_FILE
    table = Fields.of(
        parse_json(read_bytes(file, CheckpointError), CheckpointError, str(file)), CheckpointError, str(file)
    )
    if (version := table.whole("format")) != _FORMAT:
        raise CheckpointError(f"the checkpoint has format {version}, this version reads format {_FORMAT}", str(file))
    position = Position.from_json(table)
    try:
        return Saved(path, position, FileWeights(path / STATE_FILE, ()), table.by_name("names"))
    except BundleError as wrong:
        raise CheckpointError(wrong.message.replace("the weights", "the tensors"), wrong.where, _AGAIN) from None


def _name(step: int) -> str:
    return f"step-{step:08}"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(folder: Path, wrong: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint cannot be written: {wrong.strerror}", str(folder))
