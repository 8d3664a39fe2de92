"""Pass pipelines of the compiler, as data.

=====================  =========================  ============================================================
`compile_passes`       global to ranked           an annotated model to a program for each distinct rank
`RANK_PASSES`          distributed to ranked      a distributed program to programs of ranks
`FUSE_PASSES`          distributed, in and out    a distributed program as its ranks run it, for simulation
=====================  =========================  ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from distir_relax.autodiff import Differentiate, LinearCasts, ReduceGradients
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.heterogeneous import merge_stage_devices
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Inline, Module, Pass
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import (
    AccumulateInCalls,
    FuseDifferentiable,
    FuseLocal,
    JoinProducts,
    Microbatches,
    OrderSums,
    OverlapCollectives,
    Pipeline,
    Project,
    ToDistIR,
    ToPlaces,
)
from distir_relax.optimizers import (
    LOSS_SCALE,
    Averaging,
    LossScale,
    MasterWeights,
    Optimize,
    Optimizer,
    OrderUpdates,
    ReloadWeights,
    Updates,
)
from distir_relax.schedules import order_of
from distir_relax.sharding import ApplyShardings, DelayReductions, NonfiniteValues, Propagate, matched_inputs
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.hoist_positions import HoistPositions
from distir_relax.strategies.pipeline_stages import CutStages
from distir_relax.strategies.replicate_heads import ReplicateHeads
from distir_relax.strategies.strategy import OPTIONS, PassPoint, Strategy
from distir_relax.strategies.weight_memory import WeightMemory

FUSE_PASSES: tuple[Pass, ...] = (FuseLocal(), JoinProducts())
RANK_PASSES: tuple[Pass, ...] = (Inline(), Project(), *FUSE_PASSES)
DEFAULT_PROFILE = "cpu-local"
"""Default machine whose costs balance stages and schedules."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Configuration of a training step: the `optimizer`, and the names of the values of `trained` parameters.

    Gradients are clipped to the norm `clip_norm`; then, and with `gradient_norm`, their norm is an output. With
    `masters`, weights below float32 have float32 master copies. With `averaging`, averages of the parameters are kept.
    With `loss_scale`, gradients are those of a scaled loss. Sums of gradients over ranks are sums of numbers of
    `reduce_dtype`, if it is given. With `pieces`, the batch is cut into that number
    of pieces, and sums over it are sums over the pieces, in order.
    """

    optimizer: Optimizer
    trained: tuple[str, ...] | None = None
    clip_norm: float | None = None
    masters: bool = False
    averaging: Averaging | None = None
    gradient_norm: bool = False
    loss_scale: LossScale | None = None
    pieces: int | None = None
    reduce_dtype: str = ""

    @property
    def states(self) -> int:
        """The number of state tensors of a parameter."""
        return len(self.optimizer.keeps) + (self.averaging is not None)

    @property
    def losses(self) -> tuple[tuple[str, ...], ...]:
        """The losses of several updates, each followed by the parameters of its update; empty for a single one."""
        if not isinstance(self.optimizer, Updates):
            return ()
        trained = self.trained or ()
        return tuple((u.loss, *(name for name in trained if u.of(name))) for u in self.optimizer.updates)


@dataclass(frozen=True)
class EvaluationConfig:
    """Configuration of the evaluation of a training step, whose `weights` are those that the step changes.

    Parameters have `states` state tensors in the step, which limit how they are cut, and with `masters` they are
    float32. `stages` are the parameters of each stage of a pipeline.
    """

    weights: tuple[str, ...]
    states: int
    masters: bool = False
    stages: tuple[tuple[str, ...], ...] = ()


def compile_passes(
    mesh: DeviceMesh | None = None,
    tail: str = "ragged",
    shardings: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    *,
    scopes: Mapping[str, tuple[Frame, ...]] | None = None,
    outline: bool = False,
    unused: frozenset[str] = frozenset(),
    places: int = 1,
    hazards: NonfiniteValues = NonfiniteValues(),  # noqa: B008 (it is frozen)
    strategy: Strategy | None = None,
    training: TrainingConfig | None = None,
    stages: tuple[str, ...] = (),
    profile: Profile | None = None,
    repeated: bool = False,
    samples: int | None = None,
    searched: bool = False,
    memory: float | None = None,
    evaluation: EvaluationConfig | None = None,
    overlap: float = 0.0,
) -> tuple[Pass, ...]:
    """Return the passes of `compile`: from an imported model to a program for each distinct rank.

    `shardings` annotate inputs and parameters by name; `names` maps those names to values; `unused` are names without a
    value in the program. `shardings` need a `mesh`, which replaces the model's own. `tail` is ``ragged`` or ``pad``.
    With `outline` repeated blocks become functions; `scopes` maps each value to the modules that compute it. For a
    program of several `places`, `mesh` is the mesh of one. `hazards` describes nonfinite constants of the program. A
    `strategy` annotates whatever `shardings` and the model leave open. With `training` the model's first output is a
    loss, and the program a training step. `stages` are the scopes at which pipeline stages begin; by default stages
    have balanced costs on the machine of `profile`. For simulation only: with `repeated` only distinct microbatches are
    expanded, and `samples` reduces the batch. With `searched`, placements minimize the time on `profile` with `memory`
    bytes per device. With `evaluation` weights have the layouts of a training step. Collectives of a training step
    overlap with computation, small ones in buckets of `overlap` bytes, unless that is 0.
    """
    passes: list[Pass] = []
    is_trained = training is not None or evaluation is not None
    # The gradient of a weight would have to be summed over the ranks with copies of a head.
    if (
        strategy is not None
        and strategy.tensor > 1
        and not is_trained
        and not Shares.of(profile, strategy).along("tensor")
    ):
        annotated = matched_inputs(shardings or {}, names or {})
        passes.append(ReplicateHeads(strategy, annotated))
    passes += [Outline(scopes or {})] if outline else []
    if (training is not None and training.masters) or (evaluation is not None and evaluation.masters):
        passes.append(MasterWeights())
    if shardings:
        assert mesh is not None, "shardings need a mesh"
        passes.append(ApplyShardings(shardings, mesh, names or {}, unused))
    cut: tuple[Pass, ...] = ()
    schedule_passes: tuple[Pass, ...] = (ToPlaces(places),) if places > 1 else ()
    pieces = None if training is None else training.pieces
    if strategy is not None and strategy.microbatches > 1 and pieces is None:
        schedule_passes = (AccumulateInCalls(), *schedule_passes)
    if strategy is not None and strategy.pipeline > 1:
        machine = (profile or load_profile(DEFAULT_PROFILE)).with_devices(strategy.devices)
        count = strategy.pipeline * strategy.chunks
        degrees = (strategy.microbatches, strategy.data)
        shape = (strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)
        limits = _limits(strategy, machine, training or evaluation)
        of_stages = () if evaluation is None else evaluation.stages
        cut = (CutStages(count, machine, stages, *degrees, is_trained, samples, scopes or {}, *limits, of_stages),)
        schedule_passes = (Pipeline(*shape, machine),)
    parts = None
    if strategy is not None and (strategy.microbatches > 1 or samples is not None):
        parts = Microbatches(
            strategy.microbatches, hazards, repeated and pieces is None, samples, is_trained, ordered=pieces is not None
        )
    passes += _strategy_passes(strategy, training, evaluation, cut, parts, profile)
    # A simulation needs no explanations.
    propagate = Propagate(mesh, reasons=not repeated, ring="auto" if strategy is None else strategy.ring)
    placement_passes: tuple[Pass, ...] = (propagate, DelayReductions(hazards))
    if pieces is not None:
        # Sums over ranks are delayed up to those over microbatches, and without microbatches not at all.
        placement_passes = placement_passes if parts is not None else (propagate,)
        schedule_passes = (OrderSums(pieces),)
    if searched:
        placement_passes = (_by_search(mesh, tail, hazards, strategy, profile, memory),)
    if training is not None and overlap:
        schedule_passes = (*schedule_passes, OverlapCollectives(int(overlap)))
    return (*passes, *placement_passes, ToDistIR(tail), *schedule_passes, Project(), *FUSE_PASSES)


def _by_search(
    mesh: DeviceMesh | None, tail: str, hazards: NonfiniteValues, strategy: Strategy | None, profile: Profile | None,
    memory: float | None,
) -> PlaceBySearch:  # fmt: skip
    """Return the pass that searches placements; for a program of several stages it has the memory of all of them."""
    assert mesh is not None, "a search for placements needs a mesh"
    places = 1 if strategy is None else strategy.pipeline
    machine = merge_stage_devices(profile or load_profile(DEFAULT_PROFILE), places, mesh.size)
    return PlaceBySearch(mesh, machine, tail, None if memory is None else memory * places, hazards)


def _strategy_passes(
    strategy: Strategy | None,
    training: TrainingConfig | None,
    evaluation: EvaluationConfig | None,
    cut: Sequence[Pass],
    parts: Microbatches | None,
    profile: Profile | None,
) -> list[Pass]:
    """Return the passes of a strategy and a training step; `cut` splits the model into pipeline stages in between, and
    `parts` its batch into microbatches."""
    # Before a strategy annotates the program, which splits no normalized dim.
    passes: list[Pass] = [FuseDifferentiable()] if training is not None else []
    chosen = strategy or Strategy()
    is_trained = training is not None or evaluation is not None

    def of_options(point: PassPoint) -> list[Pass]:
        inserted = (option.passes(chosen, point, is_trained) for option in OPTIONS.values())
        return list(chain.from_iterable(inserted))

    if strategy is not None:
        memory = weight_memory(strategy, training or evaluation)
        passes.append(ApplyStrategy(strategy, is_trained, parts is not None, profile, memory))
        passes += of_options(PassPoint.ANNOTATED)
        passes += [HoistPositions()] if parts is not None else []
        passes += cut
    if training is not None:
        scale = LOSS_SCALE if training.loss_scale is not None else ""
        losses = training.losses
        passes += [OrderUpdates(losses)] if losses else []
        passes.append(Differentiate("", training.trained, chosen.checkpoint, scale, losses))
        passes.append(LinearCasts())
        passes += of_options(PassPoint.GRADIENTS)
    if parts is not None:
        passes.append(parts)
    if training is not None and training.reduce_dtype:
        passes.append(ReduceGradients(training.reduce_dtype))
    if parts is not None:
        pipeline = (chosen.schedule, chosen.pipeline, chosen.microbatches, chosen.chunks)
        # A search for placements may leave sums over microbatches partial between calls.
        is_ordered = training is not None and training.pieces is not None
        if not is_ordered and (chosen.placements == "rules" or chosen.mesh.size == 1):
            passes.append(AccumulateInCalls(*(pipeline if chosen.pipeline > 1 else ())))
    passes += of_options(PassPoint.STEP)
    if training is not None:
        options = (training.clip_norm, training.averaging, training.gradient_norm, training.loss_scale)
        passes.append(Optimize(training.optimizer, training.trained, *options))
    if evaluation is not None:
        passes.append(ReloadWeights(evaluation.weights))
    return passes


def weight_memory(strategy: Strategy, training: TrainingConfig | EvaluationConfig | None) -> WeightMemory:
    """Return the memory that a device needs for its weights under a strategy."""
    return strategy.weight_memory(None if training is None else training.states)


def _limits(
    strategy: Strategy, machine: Profile, training: TrainingConfig | EvaluationConfig | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the speed of each stage, and the weight bytes that fit into its devices; empty for identical devices.

    A device holds its part of a stage's weights, as if all were sharded over the tensor axis.
    """
    shares = Shares.of(machine, strategy)
    if not shares.group_speeds:
        return (), ()
    order = order_of(strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)
    speeds, capacities = shares.stages(order.rank_of)
    bytes_per_weight = weight_memory(strategy, training).total
    return speeds, tuple(capacity * strategy.tensor / bytes_per_weight for capacity in capacities)


def fuse_for_ranks(module: Module) -> Module:
    """Fuse the ops of a program of the distributed stage, as its ranks run it."""
    return run_passes(module, FUSE_PASSES)
