"""Comparison of a checkpoint with the program that resumes from it.

A parameter that both train continues with its state. One that either of them freezes has the checkpoint's value, if the
checkpoint has one, and else the bundle's, which must be that of the run that wrote the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distir_relax.bundle import STEP_COUNT, Manifest, Tensor
from distir_relax.checkpoints.folder import Saved
from distir_relax.errors import CheckpointError
from distir_relax.support.units import listed


@dataclass(frozen=True)
class Resumption:
    """Sources of a program's tensors when it resumes: `stored` are read from the checkpoint.

    `held` are those of them that the program does not change. All others are as in the bundle. `note` says in one line
    what begins anew or is dropped; it is empty if the program trains what the checkpoint's did.
    """

    stored: frozenset[str]
    held: tuple[Tensor, ...]
    note: str


def parameter_of(name: str, parameters: Collection[str]) -> str:
    """Return the parameter whose optimizer state is called `name`: ``h.weight`` of ``h.weight.exp_avg``; else ""."""
    owner = name if name not in parameters else ""
    while owner and owner not in parameters:
        owner = owner.rpartition(".")[0]
    return owner


def frozen_weights(manifest: Manifest) -> list[Tensor]:
    """Return the weights that are the model's parameters and buffers, and that a training step does not change."""
    names = {*manifest.parameters, *_buffers(manifest)} - manifest.updates.keys()
    return [tensor for tensor in manifest.weights if tensor.name in names]


def compare(saved: Saved, manifest: Manifest) -> Resumption:
    """Compare the tensors of a checkpoint with those of a program.

    Raises CheckpointError for a tensor that the program changes and the checkpoint lacks, or has in another shape or
    dtype; for one of the checkpoint that the program does not have; and for optimizer state of a trained parameter that
    the program does not keep.
    """
    kinds, weights = saved.tensors.kinds, {tensor.name: tensor for tensor in manifest.weights}
    for name, (dtype, shape) in kinds.items():
        if name in weights and (dtype, shape) != (weights[name].dtype, weights[name].shape):
            raise CheckpointError(
                f"expected {weights[name].dtype} {weights[name].shape} for {name!r}, found {dtype} {shape}",
                str(saved.path), f"it is of the program {saved.position.program!r}; was another model compiled?",
            )  # fmt: skip
    untrained = saved.position.frozen.keys() | set(saved.position.held)
    missing = [name for name in manifest.updates if name not in kinds]
    fresh = [name for name in missing if parameter_of(name, manifest.parameters) in untrained]
    if lacking := [name for name in missing if name not in (*untrained, *fresh, *_buffers(manifest))]:
        raise CheckpointError(
            f"the checkpoint lacks {listed(lacking, 4)}", str(saved.path),
            f"it is of the program {saved.position.program!r}; compile with the optimizer that it was trained with",
        )  # fmt: skip
    frozen = {*manifest.parameters, *_buffers(manifest)} - manifest.updates.keys()
    others = [name for name in kinds if name not in manifest.updates and name not in frozen]
    dropped = [name for name in others if parameter_of(name, manifest.parameters) in frozen]
    if unknown := [name for name in others if name not in dropped]:
        raise CheckpointError(
            f"the checkpoint has {listed(unknown, 4)}, which the program does not have", str(saved.path),
            f"it is of the program {saved.position.program!r}; compile with the model, the optimizer and the averaging "
            "that it was trained with, or begin a new run with its weights: step.load_parameters(FOLDER)",
        )  # fmt: skip
    # One count of steps corrects the bias of all averages: with new ones it begins anew, and the others with it.
    restarts = bool(fresh) and STEP_COUNT in manifest.updates
    if restarts:
        fresh = [name for name in manifest.updates if parameter_of(name, manifest.parameters)] + [STEP_COUNT]
    stored = frozenset(kinds) - set(dropped) - set(fresh)
    held = tuple(Tensor(name, *kinds[name]) for name in kinds if name in frozen)
    return Resumption(stored, held, _note(saved, manifest, fresh, dropped, restarts))


def check_frozen(saved: Saved, digests: Mapping[str, str], held: Collection[str]) -> None:
    """Compare the weights that the checkpoint's run did not change with those of a bundle, by their digests.

    Those `held` have the checkpoint's values. Raises CheckpointError, with the name, for one that differs.
    """
    where = str(saved.path)
    for name, digest in saved.position.frozen.items():
        if digests.get(name) != digest:
            found = "other numbers" if name in digests else "none"
            raise CheckpointError(
                f"expected the frozen weight {name!r} of the run that wrote the checkpoint, found {found}", where,
                "compile with the weights that the run began with: the same pretrained files, and the same seed",
            )  # fmt: skip
    if unknown := [name for name in digests if name not in (*saved.position.frozen, *held, *saved.tensors.kinds)]:
        raise CheckpointError(
            f"the checkpoint has neither a value nor a hash of {listed(unknown, 4)}", where,
            f"it is of the program {saved.position.program!r}; was another model compiled?",
        )  # fmt: skip


def _buffers(manifest: Manifest) -> set[str]:
    """Return the model's buffers, which a program has as weights, or does not need in the mode of the model."""
    training = manifest.training
    return set() if training is None else {*training.buffers, *training.names.values()} - manifest.parameters.keys()


def _note(saved: Saved, manifest: Manifest, fresh: Collection[str], dropped: Collection[str], restarts: bool) -> str:
    def owners(names: Collection[str]) -> str:
        return listed(list(dict.fromkeys(filter(None, (parameter_of(n, manifest.parameters) for n in names)))), 3)

    parts = []
    if restarts:
        added = [name for name in manifest.parameters if name in saved.position.frozen or name in saved.position.held]
        trained = [name for name in added if name in manifest.updates]
        parts.append(f"the optimizer's state begins anew, as {listed(trained, 3)} had none")
    elif fresh:
        parts.append(f"the optimizer's state of {owners(fresh)} begins anew")
    if dropped:
        parts.append(f"the optimizer's state of {owners(dropped)}, now frozen, is dropped")
    return "; ".join(parts)
