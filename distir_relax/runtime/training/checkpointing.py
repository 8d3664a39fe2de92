"""Collective checkpointing: each rank writes and reads its own shards of the global tensors."""

from __future__ import annotations

import warnings
from pathlib import Path

from distir_relax.checkpoints import (
    STATE_FILE,
    Position,
    Saved,
    StateFile,
    begin,
    best,
    checkpoint_names,
    finish,
    latest,
    remove,
)
from distir_relax.errors import CheckpointError
from distir_relax.runtime.state import changing
from distir_relax.runtime.training.executor import Executor


def save(executor: Executor, folder: Path, position: Position, keep: int, is_best: bool = False) -> Path | None:
    """Write a checkpoint atomically, marked as the best if it `is_best`; return its folder on the first process.

    All processes call it, and must see the folder. The newest `keep - 1` older checkpoints stay, and the best. Raises
    CheckpointError on all processes if one of them cannot write.
    """
    tensors = changing(executor.bundle.manifest)
    training = executor.bundle.manifest.training
    names = {} if training is None else training.names
    mine: list[Path] = []
    try:
        with executor.agreed():
            if executor.first:
                mine.append(begin(folder, position.step))
                with StateFile(mine[0] / STATE_FILE, tensors, make=True) as file:
                    executor.save_pieces(file)
        draft = Path(executor.exchange(str(mine[0].resolve()) if executor.first else "")[0])
        with executor.agreed():
            if not executor.first:
                with StateFile(draft / STATE_FILE, tensors) as file:
                    executor.save_pieces(file)
        with executor.agreed():
            return folder / finish(draft, position, keep, is_best, names).name if executor.first else None
    except BaseException:
        for path in mine:
            remove(path)
        raise


def resume(executor: Executor, folder: Path, which: str = "last") -> Saved | None:
    """Load the "last" or the "best" checkpoint of a folder into the ranks, whatever number of ranks has written it.

    With "auto" it is the newest complete one, and None if there is none. Raises CheckpointError on all processes
    if it is missing, damaged, or does not fit the program.
    """
    if which == "auto":
        chosen = executor.exchange(_newest_complete(folder) if executor.first else "")[0]
        if not chosen:
            return None
        folder = folder / chosen
    with executor.agreed():
        saved = best(folder) if which == "best" else latest(folder)
        if saved is None:
            raise CheckpointError(
                "there is no best checkpoint in this folder", str(folder), "--best METRIC keeps one; --resume continues"
            )
        saved.check_fits(changing(executor.bundle.manifest))
    identities = executor.exchange([saved.path.name, *saved.tensors.identity[2:]])
    with executor.agreed():
        if any(theirs != identities[0] for theirs in identities):
            raise CheckpointError("the ranks see different checkpoints", str(folder), "put it on a shared file system")
        executor.load_state(saved.tensors)
    return saved


def _newest_complete(folder: Path) -> str:
    """Return the name of the newest readable checkpoint; warn about the others."""
    for name in checkpoint_names(folder):
        try:
            return latest(folder / name).path.name
        except CheckpointError as wrong:
            warnings.warn(f"a checkpoint is skipped: {wrong.where}: {wrong.message}", stacklevel=2)
    return ""
