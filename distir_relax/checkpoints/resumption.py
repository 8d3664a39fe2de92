"""Comparison of a checkpoint with the program that resumes from it.

A parameter that both train continues with its state. One that either of them freezes has the checkpoint's value, if the
checkpoint has one, and else the bundle's, which must be that of the run that wrote the checkpoint. A trained parameter
that the checkpoint does not know, such as an adapter, begins as in the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import AVERAGED, OWN_STEP, STEP_COUNT, FileWeights, Manifest, Tensor
from distir_relax.checkpoints.folder import Saved
from distir_relax.checkpoints.position import Position
from distir_relax.errors import CheckpointError
from distir_relax.layout import Interval
from distir_relax.support.learning_rate import describe_schedule
from distir_relax.support.units import listed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Resumption:
    """Sources of a program's tensors when it resumes: `stored` are read from the checkpoint.

    `held` are those of them that the program does not change. All others are as in the bundle. `note` says in one line
    what begins anew or is dropped, and which settings have changed; it is empty if the program is the checkpoint's.
    """

    stored: frozenset[str]
    held: tuple[Tensor, ...]
    note: str


@dataclass(frozen=True)
class RenamedTensors:
    """The tensors of a checkpoint by the names of a program: `names` maps these to those in the file."""

    file: FileWeights
    names: Mapping[str, str]

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each tensor, by name."""
        return {name: self.file.kinds[key] for name, key in self.names.items()}

    def read(self, name: str, intervals: Sequence[Sequence[Interval]]) -> torch.Tensor:
        """See `WeightSource.read`."""
        return self.file.read(self.names.get(name, name), intervals)


@dataclass(frozen=True)
class Renamed:
    """A checkpoint by the names of a program: its folder, its tensors, and its position.

    `frozen` are the hashes of weights that its run did not change, `held` those of them that it has, `fixed` the hashes
    of the model's buffers and tensor attributes.
    """

    path: Path
    position: Position
    tensors: RenamedTensors
    frozen: Mapping[str, str]
    held: frozenset[str]
    fixed: Mapping[str, str]

    @property
    def program(self) -> str:
        """The name of the program that it is of."""
        return self.position.program


def by_names_of(saved: Saved, manifest: Manifest) -> Renamed:
    """Return a checkpoint by the names of a program.

    A layer that peft has wrapped since, or no longer wraps, has the same tensors under other names.
    """
    known = {*(tensor.name for tensor in manifest.weights), *_buffers(manifest), *fixed_digests(manifest)}
    unwrapped = {_unwrapped(name): name for name in known}

    def renamed(name: str) -> str:
        head = name
        while head and name not in known:
            if (other := unwrapped.get(_unwrapped(head))) is not None:
                return other + name[len(head) :]
            head = head.rpartition(".")[0]
        return name

    tensors = RenamedTensors(saved.tensors, {renamed(name): name for name in saved.tensors.kinds})
    frozen = {renamed(name): digest for name, digest in saved.position.frozen.items()}
    fixed = {renamed(name): digest for name, digest in saved.position.fixed.items()}
    held = frozenset(map(renamed, saved.position.held))
    return Renamed(saved.path, saved.position, tensors, frozen, held, fixed)


def _unwrapped(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


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


def fixed_digests(manifest: Manifest) -> Mapping[str, str]:
    """Return the hashes of buffers and tensor attributes of the model that training does not change."""
    return {} if manifest.training is None else manifest.training.fixed


def compare(saved: Renamed, manifest: Manifest) -> Resumption:
    """Compare the tensors of a checkpoint with those of a program.

    Raises CheckpointError for a tensor in another shape or dtype, for one of the checkpoint that the program does not
    have, for state of a parameter that both train which one of them does not keep, and for state of another kind of
    optimizer.
    """
    kinds, weights = saved.tensors.kinds, {tensor.name: tensor for tensor in manifest.weights}
    for name, (dtype, shape) in kinds.items():
        if name in weights and (dtype, shape) != (weights[name].dtype, weights[name].shape):
            raise CheckpointError(
                f"expected {weights[name].dtype} {weights[name].shape} for {name!r}, found {dtype} {shape}",
                str(saved.path), f"it is of the program {saved.program!r}; was another model compiled?",
            )  # fmt: skip
    trained = kinds.keys() - saved.held
    missing = [name for name in manifest.updates if name not in kinds]
    owners = {name: parameter_of(name, manifest.parameters) for name in missing}
    fresh = [name for name in missing if owners[name] and owners[name] not in trained]
    begins_as_compiled = {*manifest.parameters, *_buffers(manifest), *fresh}
    if lacking := [name for name in missing if name not in begins_as_compiled]:
        raise CheckpointError(
            f"the checkpoint lacks {listed(lacking, 4)}", str(saved.path),
            f"it is of the program {saved.program!r}; compile with the optimizer that it was trained with",
        )  # fmt: skip
    frozen = {*manifest.parameters, *_buffers(manifest)} - manifest.updates.keys()
    others = [name for name in kinds if name not in manifest.updates and name not in frozen]
    dropped = [name for name in others if parameter_of(name, manifest.parameters) in frozen]
    if unknown := [name for name in others if name not in dropped]:
        raise CheckpointError(
            f"the checkpoint has {listed(unknown, 4)}, which the program does not have", str(saved.path),
            f"it is of the program {saved.program!r}; compile with the model, the optimizer and the averaging "
            "that it was trained with, or begin a new run with its weights: step.load_parameters(FOLDER)",
        )  # fmt: skip
    # One count of steps corrects the bias of all averages: with new ones it begins anew, and the others with it. Some
    # optimizers count for each parameter.
    own = all(f"{owners[name]}.{OWN_STEP}" in manifest.updates for name in fresh)
    restarts, added = STEP_COUNT in manifest.updates and not own, fresh
    if restarts:
        fresh = [name for name in manifest.updates if parameter_of(name, manifest.parameters)] + [STEP_COUNT]
    stored = frozenset(kinds) - set(dropped) - set(fresh)
    held = tuple(Tensor(name, *kinds[name]) for name in kinds if name in frozen)
    settings: Mapping[str, str] = {} if manifest.training is None else manifest.training.settings
    before, now = (texts.get("optimizer", "") for texts in (saved.position.settings, settings))
    states = [n for n in stored & manifest.updates.keys() if _is_state(n, manifest)]
    if states and before and before != now:
        raise CheckpointError(
            f"expected the optimizer {before} of the run that wrote the checkpoint, found {now}", str(saved.path),
            f"{listed(sorted(states), 1)} would get another meaning; begin a new run with the weights of the "
            "checkpoint: step.load_parameters(FOLDER)",
        )  # fmt: skip
    unknown_before = [name for name in missing if name in manifest.parameters and name not in saved.frozen]
    notes = (_note(manifest, unknown_before, added, dropped, restarts), *_changed_settings(saved.position, manifest))
    return Resumption(stored, held, "; ".join(filter(None, notes)))


def check_frozen(
    saved: Renamed, digests: Mapping[str, str], held: Collection[str], fixed: Mapping[str, str] | None = None
) -> None:
    """Compare the weights that the checkpoint's run did not change with those of a bundle, by their digests.

    Those `held` have the checkpoint's values. Of `fixed` (`fixed_digests`) those that both programs read are compared:
    which of them are weights, and which are folded, depends on their uses. Raises CheckpointError, with the name, for
    one that differs.
    """
    where, present = str(saved.path), {**(fixed or {}), **digests}
    shared = {n: x for n, x in saved.fixed.items() if n in present and n not in saved.tensors.kinds}
    for name, digest in {**shared, **saved.frozen}.items():
        if present.get(name) != digest:
            found = "other numbers" if name in present else "none"
            raise CheckpointError(
                f"expected the frozen weight {name!r} of the run that wrote the checkpoint, found {found}", where,
                "compile with the weights that the run began with: the same pretrained files, and the same seed",
            )  # fmt: skip
    if unknown := [n for n in digests if n not in (*saved.frozen, *saved.fixed, *held, *saved.tensors.kinds)]:
        raise CheckpointError(
            f"the checkpoint has neither a value nor a hash of {listed(unknown, 4)}", where,
            f"it is of the program {saved.program!r}; was another model compiled?",
        )  # fmt: skip


def _buffers(manifest: Manifest) -> set[str]:
    """Return the model's buffers, which a program has as weights, or does not need in the mode of the model."""
    training = manifest.training
    return set() if training is None else {*training.buffers, *training.names.values()} - manifest.parameters.keys()


def _is_state(name: str, manifest: Manifest) -> bool:
    """Return whether a tensor is state of the optimizer, other than an average of a parameter."""
    return not name.endswith(AVERAGED) and bool(parameter_of(name, manifest.parameters))


def _changed_settings(position: Position, manifest: Manifest) -> list[str]:
    """Return how the schedules and the clipping of a program differ from those of a checkpoint, which they may."""
    training = manifest.training
    if training is None:
        return []
    schedules = {name: _normal(describe_schedule(schedule)) for name, schedule in training.rates.items()}
    before = {name: _normal(schedule) for name, schedule in position.rates.items()}
    changed = {name: (before.get(name), schedules.get(name)) for name in {**before, **schedules}}
    notes = [f"{n} is now {_schedule(b)}, was {_schedule(a)}" for n, (a, b) in changed.items() if a != b and before]
    both = position.settings.keys() & training.settings.keys()
    pairs = {name: (position.settings[name], training.settings[name]) for name in sorted(both)}
    return notes + [f"{name} is now {b}, was {a}" for name, (a, b) in pairs.items() if a != b]


def _normal(schedule: object) -> Any:
    """Return a schedule as JSON has it, with lists for tuples."""
    return json.loads(json.dumps(schedule))


def _schedule(table: Any) -> str:
    """Return a schedule as a call with its numbers, without those of a table."""
    if not isinstance(table, dict):
        return "none"
    numbers = (f"{name}={value:g}" for name, value in table.items() if isinstance(value, (int, float)))
    inner = (_schedule(value) for value in table.values() if isinstance(value, dict))
    return f"{table.get('kind')}({', '.join((*inner, *numbers))})"


def _note(
    manifest: Manifest, new: Sequence[str], fresh: Collection[str], dropped: Collection[str], restarts: bool
) -> str:
    def owners(names: Collection[str]) -> str:
        return listed(list(dict.fromkeys(filter(None, (parameter_of(n, manifest.parameters) for n in names)))), 3)

    parts = []
    if new:
        parts.append(f"the checkpoint does not have {listed(new, 3)}: as compiled")
    if restarts:
        parts.append(
            f"the optimizer's state begins anew, as {owners(fresh)} had none; with own_steps=True others keep theirs"
        )
    elif fresh:
        parts.append(f"the optimizer's state of {owners(fresh)} begins anew")
    if dropped:
        parts.append(f"the optimizer's state of {owners(dropped)}, now frozen, is dropped")
    return "; ".join(parts)
