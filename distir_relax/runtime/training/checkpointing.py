"""Collective checkpointing: each rank writes and reads its own shards of the global tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distir_relax.bundle import Tensor
from distir_relax.bundle.weights import SharedWeights
from distir_relax.checkpoints import (
    STATE_FILE,
    Position,
    Renamed,
    Saved,
    StateFile,
    begin,
    best,
    by_names_of,
    check_frozen,
    checkpoint_names,
    compare,
    finish,
    fixed_digests,
    frozen_weights,
    latest,
    remove,
)
from distir_relax.errors import CheckpointError
from distir_relax.runtime.state import changing
from distir_relax.runtime.training.executor import Executor, whole
from distir_relax.support.tensor_bytes import tensor_digest


def save(executor: Executor, folder: Path, position: Position, keep: int, is_best: bool = False) -> Path | None:
    """Write a checkpoint atomically, marked as the best if it `is_best`; return its folder on the first process.

    All processes call it, and must see the folder. The newest `keep - 1` older checkpoints stay, and the best. Raises
    CheckpointError on all processes if one of them cannot write.
    """
    tensors = [*changing(executor.bundle.manifest), *executor.held]
    if executor.frozen is None:
        executor.frozen = _digests(executor, frozen_weights(executor.bundle.manifest))
    held = tuple(tensor.name for tensor in executor.held)
    frozen = {name: digest for name, digest in executor.frozen.items() if name not in held}
    position = replace(position, frozen=frozen, held=held, fixed=fixed_digests(executor.bundle.manifest))
    training = executor.bundle.manifest.training
    names = {} if training is None else training.names
    mine: list[Path] = []
    try:
        with executor.agreed():
            if executor.first:
                mine.append(begin(folder, position.step))
                with StateFile(mine[0] / STATE_FILE, tensors, make=True) as file:
                    executor.save_pieces(file)
                    for tensor in executor.held:
                        file.write(tensor.name, whole(tensor), executor.held_values.read(tensor.name, whole(tensor)))
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


def check_visible(executor: Executor, folder: Path) -> None:
    """Raise CheckpointError on all processes unless each sees the files that the first one writes to the folder.

    Without it a run on hosts that share no disk would fail at its first checkpoint, hours later.
    """
    if executor.processes == 1:
        return
    mine: list[Path] = []
    with executor.agreed():
        if executor.first:
            mine.append(begin(folder, 0))
    draft = Path(executor.exchange(str(mine[0].resolve()) if mine else "")[0])
    try:
        with executor.agreed():
            if not draft.is_dir():
                raise CheckpointError(
                    "expected the folder of checkpoints in which the first rank writes, found another or none",
                    str(folder), "put it on a file system that all hosts share",
                )  # fmt: skip
    finally:
        for path in mine:
            remove(path)


def resume(executor: Executor, folder: Path, which: str = "last") -> Saved | None:
    """Load the "last" or the "best" checkpoint of a folder into the ranks, whatever number of ranks has written it.

    The folder may be a checkpoint itself. With "auto" it is the newest complete one, and None if there is none. Raises
    CheckpointError on all processes if it is missing, damaged, or does not fit the program (`compare`, `check_frozen`).
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
        renamed = by_names_of(saved, executor.bundle.manifest)
        resumption = compare(renamed, executor.bundle.manifest)
    identities = executor.exchange([saved.path.name, *saved.tensors.identity[2:]])
    with executor.agreed():
        if any(theirs != identities[0] for theirs in identities):
            raise CheckpointError("the ranks see different checkpoints", str(folder), "put it on a shared file system")
    digests = _digests(executor, _frozen_in_either(executor, renamed))
    with executor.agreed():
        held = [tensor.name for tensor in resumption.held]
        check_frozen(renamed, digests, held, fixed_digests(executor.bundle.manifest))
    if resumption.held:
        executor.hold(resumption.held, renamed.tensors)
    with executor.agreed():
        executor.load_state(SharedWeights(executor.initial_weights, renamed.tensors, resumption.stored))
    if resumption.note and executor.first:
        warnings.warn(f"resumed after step {saved.position.step}: {resumption.note}", stacklevel=2)
    return saved


def _digests(executor: Executor, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return the hashes of weights as the program was loaded with them; each process computes some."""
    mine: dict[str, str] = {}
    with executor.agreed():
        for tensor in tensors[executor.index :: executor.processes]:
            mine[tensor.name] = tensor_digest(executor.initial_weights.read(tensor.name, whole(tensor)))
    return {name: digest for theirs in executor.exchange(mine) for name, digest in theirs.items()}


def _frozen_in_either(executor: Executor, saved: Renamed) -> list[Tensor]:
    """Return the weights that the program, or the checkpoint's run, does not change."""
    manifest = executor.bundle.manifest
    frozen = {tensor.name: tensor for tensor in frozen_weights(manifest)}
    return [t for t in manifest.weights if t.name in frozen or t.name in saved.frozen]


def _newest_complete(folder: Path) -> str:
    """Return the name of the newest readable checkpoint; warn about the others."""
    for name in checkpoint_names(folder):
        try:
            return latest(folder / name).path.name
        except CheckpointError as wrong:
            warnings.warn(f"a checkpoint is skipped: {wrong.where}: {wrong.message}", stacklevel=2)
    return ""
