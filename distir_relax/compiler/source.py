"""Imported models, to be compiled or simulated under several strategies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.pass_manager import Observer, Verify, proves_by_default, run_passes
from distir_relax.compiler.pass_pipeline import FUSE_PASSES, EvaluationConfig, TrainingConfig, compile_passes
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import AnnotationError, DistIRError, VerificationError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.shape_ops import with_shape_ops
from distir_relax.ir import BatchDim, Module, Pass, gc_disabled, verifies_by_default
from distir_relax.ir.symbols import at_sizes, module_symbols
from distir_relax.layout import DeviceMesh, as_mesh
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import find_nonfinite
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies.batch_dim import find_batch
from distir_relax.strategies.factor_costs import classes_of
from distir_relax.strategies.strategy import Strategy, as_strategy


class NothingSplit(UserWarning):
    """A mesh was given, but nothing is sharded over it: every rank computes everything."""


@dataclass(frozen=True, repr=False)
class Source:
    """An imported model with complete compilation options.

    With `training` it is a training step, with `evaluation` the evaluation of one.
    """

    imported: Imported
    options: CompileOptions
    training: TrainingConfig | None = None
    evaluation: EvaluationConfig | None = None

    def __repr__(self) -> str:
        return f"<source: {self.imported!r}, strategy {self.options['strategy']}>"

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that distributes the model, if any."""
        strategy = self.options["strategy"]
        return None if strategy is None else as_strategy(strategy)

    @property
    def is_training(self) -> bool:
        """Whether it is a training step."""
        return self.training is not None

    @property
    def checks(self) -> list[Observer]:
        """The observers that verify the program between passes."""
        verify = self.options["verify"]
        return [Verify()] if (verifies_by_default() if verify is None else verify) else []

    @property
    def is_proved(self) -> bool:
        """Whether the plan is compared with the model: by default for inference by the compiler's own passes."""
        check, is_inference = self.options["check"], self.training is None and self.options["passes"] is None
        return is_inference and proves_by_default() if check is None else check

    @property
    def batch(self) -> int | None:
        """The batch size of the example; None without a batch dim."""
        try:
            return find_batch(classes_of(self.imported.module)).size
        except DistIRError:
            return None

    def at(self, sizes: Mapping[str, int]) -> Source:
        """Return the same model with these values of symbolic sizes by name, and the typical values of others."""
        return replace(self, imported=replace(self.imported, module=at_sizes(self.imported.module, sizes)))

    def with_strategy(self, strategy: Strategy) -> Source:
        """Return the same model, to be distributed by another strategy."""
        return replace(self, options={**self.options, "strategy": strategy, "mesh": None})

    def with_shape_ops(self) -> Source:
        """Return the same model with the ops on shapes that its own program runs, for simulation."""
        return replace(self, imported=with_shape_ops(self.imported))

    def passes(self, repeated: bool = False, samples: int | None = None) -> tuple[Pass, ...]:
        """Return the passes of `compile`; `repeated` and `samples` are as for `compile_passes`.

        Raises `AnnotationError` for a mesh that is not the strategy's, shardings without a mesh, and options that
        exclude ``shardings="auto"``; warns if nothing is sharded over the mesh.
        """
        options, imported, strategy = self.options, self.imported, self.strategy
        explicit_mesh = _explicit_mesh(options["mesh"], strategy)
        shardings, profile = options["shardings"], options["profile"]
        named = None if isinstance(shardings, str) else shardings
        searched = _is_searched(options, strategy, imported)
        target = _target(explicit_mesh, named, imported.module, strategy is not None or searched)
        if searched and target is None:
            raise AnnotationError('expected a mesh with shardings="auto", found none', hint="pass mesh=2 for 2 devices")
        passes = compile_passes(
            target if named or searched else explicit_mesh,
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
            evaluation=self.evaluation,
            stages=tuple(options["stages"]),
            profile=None if profile is None else as_profile(profile),
            repeated=repeated,
            samples=samples,
            searched=searched,
            memory=options["memory"],
            overlap=options["overlap"],
        )
        select = options["passes"]
        return passes if select is None else tuple(select(passes))

    def distributed(self, repeated: bool = False, samples: int | None = None) -> Module:
        """Return the distributed program as its ranks run it. Raises as `compile` does; warns only of the mesh."""
        return run_passes(self.imported.module, self.distributed_passes(repeated, samples), self.checks)

    def distributed_passes(self, repeated: bool = False, samples: int | None = None) -> tuple[Pass, ...]:
        """Return the passes of `distributed`. Raises and warns as `passes` does."""
        steps = takewhile(lambda step: step.gives != "ranked", self.passes(repeated, samples))
        return (*steps, *FUSE_PASSES)

    def simulate(self, profile: Profile, samples: int | None = None) -> Simulation:
        """Simulate the program on a machine; equal microbatches are expanded once.

        `samples` reduces the batch to this size. Symbolic sizes have their typical values. Raises as `compile` and
        `simulate_module` do.
        """
        if profile.shape_op and self.imported.shape_ops:
            return self.with_shape_ops().simulate(profile, samples)
        if module_symbols(self.imported.module):
            return self.at({}).simulate(profile, samples)
        repeated = self.strategy is not None and self.strategy.microbatches > 1
        with gc_disabled():
            try:
                result = simulate_module(self.distributed(repeated, samples), profile)
            except VerificationError:
                if not repeated:
                    raise
                # The microbatches of this model differ.
                result = simulate_module(self.distributed(False, samples), profile)
        result.samples = samples or batch_size(result.module)
        return result


def batch_size(module: Module) -> int | None:
    """Return the batch size that a strategy recorded, if any."""
    return next((record.size for record in module.records if isinstance(record, BatchDim)), None)


def _is_searched(options: CompileOptions, strategy: Strategy | None, imported: Imported) -> bool:
    """Return whether placements are searched. Raises `AnnotationError` if they cannot be."""
    by_strategy = strategy is not None and strategy.placements == "auto"
    shardings = options["shardings"]
    if not isinstance(shardings, str):
        if options["memory"] is not None and not by_strategy:
            raise AnnotationError("memory limits a search for placements, found none", hint='give shardings="auto"')
        return by_strategy
    if shardings != "auto":
        raise AnnotationError(f'expected shardings by name, or "auto", found {shardings!r}')
    if strategy is not None or imported.places > 1:
        conflict = "a program of several places" if strategy is None else f"the strategy {strategy}"
        raise AnnotationError(
            f'shardings="auto" searches placements on one mesh, found also {conflict}',
            hint="remove one of them" if strategy is None else f'remove it, or give "{strategy},placements=auto"',
        )
    return True


def _explicit_mesh(mesh: DeviceMesh | int | Sequence[int] | None, strategy: Strategy | None) -> DeviceMesh | None:
    """Return the mesh given by the user or by a strategy."""
    explicit = None if mesh is None else as_mesh(mesh)
    if strategy is None:
        return explicit
    if explicit is not None and explicit.shape != strategy.mesh.shape:
        raise AnnotationError(
            f"the strategy {strategy} is for {strategy.mesh}, found mesh={explicit}", hint="remove the mesh"
        )
    return strategy.mesh


def _target(
    explicit: DeviceMesh | None, shardings: Mapping[str, str] | None, module: Module, split: bool
) -> DeviceMesh | None:
    """Return the mesh to compile for: the given one, or that of the annotations."""
    target = explicit or next(iter(module.meshes), None)
    if shardings and target is None:
        raise AnnotationError("expected a mesh with shardings, found none", hint="pass mesh=2 for 2 devices")
    if explicit is not None and explicit.size > 1 and not split and not shardings and not _annotated(module):
        warnings.warn(
            f"nothing is sharded over {explicit}: every rank will compute everything. Give "
            'shardings={"PATTERN": "S[0]"} with names of parameters or inputs, or mark tensors with annotate_sharding',
            NothingSplit,
            stacklevel=6,
        )
    return target


def _annotated(module: Module) -> bool:
    return any(Trait.ANNOTATION in lookup(op.name).traits for function in module.functions for op in function.ops)
