"""A model that was read in: compiled or simulated, under one strategy after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.simulator import simulate_module
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.pass_manager import Observer, Verify, run_passes, verifies_by_default
from distir_relax.compiler.pass_pipeline import AS_RANKS_RUN, StepOfTraining, compile_passes
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import AnnotationError, DistIRError, VerificationError
from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import BatchDim, Module, Pass
from distir_relax.layout import DeviceMesh, as_mesh
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import find_nonfinite
from distir_relax.strategies.batch_dim import find_batch
from distir_relax.strategies.factor_costs import classes_of
from distir_relax.strategies.strategy import Strategy, as_strategy


class NothingSplit(UserWarning):
    """A mesh was given, and nothing says what is split over it: every rank computes everything."""


@dataclass(frozen=True, repr=False)
class Source:
    """An imported model, and the options to compile it with, complete. `training` makes a step of its loss."""

    imported: Imported
    options: CompileOptions
    training: StepOfTraining | None = None

    def __repr__(self) -> str:
        return f"<source: {self.imported!r}, strategy {self.options['strategy']}>"

    @property
    def strategy(self) -> Strategy | None:
        """How it is to be distributed, where that is by a strategy."""
        given = self.options["strategy"]
        return None if given is None else as_strategy(given)

    @property
    def is_training(self) -> bool:
        """Whether it is a step of training."""
        return self.training is not None

    @property
    def checks(self) -> list[Observer]:
        """What looks at the program between passes."""
        wanted = self.options["verify"]
        return [Verify()] if (verifies_by_default() if wanted is None else wanted) else []

    @property
    def batch(self) -> int | None:
        """How many samples the model was read in with; None where it has no batch."""
        try:
            return find_batch(classes_of(self.imported.module)).size
        except DistIRError:
            return None

    def under(self, strategy: Strategy) -> Source:
        """The same model, to be distributed by another strategy."""
        return replace(self, options={**self.options, "strategy": strategy, "mesh": None})

    def passes(self, repeated: bool = False, samples: int | None = None) -> tuple[Pass, ...]:
        """The passes of `compile`; `repeated` and `samples` are as for `compile_passes`.

        Raises `AnnotationError` for a mesh that is not the strategy's, shardings without a mesh, and for what cannot be
        asked for together with ``shardings="auto"``; warns of a mesh over which nothing is split.
        """
        options, imported, strategy = self.options, self.imported, self.strategy
        given = _given_mesh(options["mesh"], strategy)
        shardings, profile = options["shardings"], options["profile"]
        named = None if isinstance(shardings, str) else shardings
        searched = _is_searched(options, strategy, imported)
        target = _target(given, named, imported.module, strategy is not None or searched)
        if searched and target is None:
            raise AnnotationError('shardings="auto" was given without a mesh', hint="pass mesh=2, for two devices")
        chosen = compile_passes(
            target if named or searched else given,
            options["tail"],
            named,
            imported.names,
            scopes=imported.scopes,
            outline=options["outline"],
            unused=imported.unused,
            places=imported.places,
            hazards=find_nonfinite(imported.module, imported.tensors),
            strategy=strategy,
            training=self.training,
            stages=tuple(options["stages"]),
            profile=None if profile is None else as_profile(profile),
            repeated=repeated,
            samples=samples,
            searched=searched,
            memory=options["memory"],
        )
        select = options["passes"]
        return chosen if select is None else tuple(select(chosen))

    def distributed(self, repeated: bool = False, samples: int | None = None) -> Module:
        """The program of the distributed stage, as its ranks run it. Raises as `compile` does, and warns of nothing."""
        return run_passes(self.imported.module, self.passes_of_all_ranks(repeated, samples), self.checks)

    def passes_of_all_ranks(self, repeated: bool = False, samples: int | None = None) -> tuple[Pass, ...]:
        """The passes of `distributed`. Raises and warns as `passes` does."""
        steps = takewhile(lambda step: step.gives != "ranked", self.passes(repeated, samples))
        return (*steps, *AS_RANKS_RUN)

    def simulate(self, profile: Profile, samples: int | None = None) -> Simulation:
        """The run of the program on a machine, microbatches that do the same written out once.

        With `samples`, as if the batch had only so many. Raises as `compile` and `simulate_module` do.
        """
        repeated = self.strategy is not None and self.strategy.microbatches > 1
        try:
            found = simulate_module(self.distributed(repeated, samples), profile)
        except VerificationError:
            if not repeated:
                raise
            # Microbatches of this model do not all do the same.
            found = simulate_module(self.distributed(False, samples), profile)
        found.samples = samples or samples_of(found.module)
        return found


def samples_of(module: Module) -> int | None:
    """How many samples the batch has that a strategy found."""
    return next((record.size for record in module.records if isinstance(record, BatchDim)), None)


def _is_searched(options: CompileOptions, strategy: Strategy | None, imported: Imported) -> bool:
    """Whether placements are looked for. Raises `AnnotationError` where they cannot be."""
    by_strategy = strategy is not None and strategy.placements == "auto"
    shardings = options["shardings"]
    if not isinstance(shardings, str):
        if options["memory"] is not None and not by_strategy:
            raise AnnotationError("memory is a limit for placements that are looked for", hint='give shardings="auto"')
        return by_strategy
    if shardings != "auto":
        raise AnnotationError(f'expected shardings by name, or "auto", found {shardings!r}')
    if strategy is not None or imported.places > 1:
        found = "a program of several places" if strategy is None else f"the strategy {strategy}"
        raise AnnotationError(
            f'shardings="auto" looks for placements on one mesh, found {found} too',
            hint="leave one of them out" if strategy is None else f'leave it out, or give "{strategy},placements=auto"',
        )
    return True


def _given_mesh(mesh: DeviceMesh | int | Sequence[int] | None, strategy: Strategy | None) -> DeviceMesh | None:
    """The mesh that is given, by itself or by a strategy."""
    given = None if mesh is None else as_mesh(mesh)
    if strategy is None:
        return given
    if given is not None and given.shape != strategy.mesh.shape:
        raise AnnotationError(
            f"the strategy {strategy} is for {strategy.mesh}, found mesh={given}", hint="leave the mesh out"
        )
    return strategy.mesh


def _target(
    given: DeviceMesh | None, shardings: Mapping[str, str] | None, module: Module, split: bool
) -> DeviceMesh | None:
    """The mesh that a model is compiled for: what was given, or what its annotations name."""
    target = given or next(iter(module.meshes), None)
    if shardings and target is None:
        raise AnnotationError("shardings were given without a mesh", hint="pass mesh=2, for two devices")
    if given is not None and given.size > 1 and not split and not shardings and not _annotated(module):
        warnings.warn(
            f"{given} was given, and nothing says what is split over it: every rank will compute everything. Give "
            'shardings={"PATTERN": "S[0]"} with names of parameters or inputs, or mark tensors with annotate_sharding',
            NothingSplit,
            stacklevel=6,
        )
    return target


def _annotated(module: Module) -> bool:
    return any(Trait.ANNOTATION in lookup(op.name).traits for function in module.functions for op in function.ops)
