"""Pass pipelines of the compiler, as data.

=====================  =========================  ============================================================
`compile_passes`       global to ranked           a model, annotated, to a program for each distinct rank
`RANK_PASSES`          distributed to ranked      a schedule that exists already, to programs of ranks
`AS_RANKS_RUN`         distributed, in and out    a schedule as its ranks will run it, to be simulated
=====================  =========================  ============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.autodiff import Differentiate
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.heterogeneous import merge_stage_devices
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Inline, Module, Pass
from distir_relax.layout import DeviceMesh
from distir_relax.lowering import AccumulateInCalls, FuseLocal, Microbatches, Pipeline, Project, ToDistIR, ToPlaces
from distir_relax.optimizers import MasterWeights, Optimize, Optimizer
from distir_relax.schedules import order_of
from distir_relax.sharding import ApplyShardings, DelayReductions, NonfiniteValues, Propagate
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.heterogeneous import Shares
from distir_relax.strategies.hoist_positions import HoistPositions
from distir_relax.strategies.pipeline_stages import CutStages
from distir_relax.strategies.sequence_parallel import SplitSequence
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategies.weight_memory import WeightMemory
from distir_relax.strategies.zero import GatherParameters, ShardGradients

RANK_PASSES: tuple[Pass, ...] = (Inline(), Project(), FuseLocal())
DEFAULT_PROFILE = "cpu-local"
"""The machine whose costs stages and schedules are balanced by where none is named."""
AS_RANKS_RUN: tuple[Pass, ...] = (FuseLocal(),)


@dataclass(frozen=True, slots=True)
class StepOfTraining:
    """A step of training: the `optimizer`, and the parameters that are `trained`, by the names of their values.

    Gradients are clipped to the norm `clip_norm`. With `masters` weights of less than float32 are kept in float32.
    """

    optimizer: Optimizer
    trained: tuple[str, ...] | None = None
    clip_norm: float | None = None
    masters: bool = False


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
    training: StepOfTraining | None = None,
    stages: tuple[str, ...] = (),
    profile: Profile | None = None,
    repeated: bool = False,
    samples: int | None = None,
    searched: bool = False,
    memory: float | None = None,
) -> tuple[Pass, ...]:
    """The passes of `compile`: from an imported model to a program for each distinct rank.

    `shardings` mark inputs and parameters by name, `names` leads from those names to values, `unused` are names that
    the program has no value for; `mesh` is needed for them, and takes the place of the model's own. `tail` is
    ``ragged`` or ``pad``. With `outline` repeated blocks become functions; `scopes` says which module each value is
    made in. Of a program of several `places`, the mesh is that of one. `hazards` is what is known of the program's
    constants. A `strategy` marks what `shardings` and the model leave open. With `training` the model's first output is
    a loss, and the program a step that makes it smaller. `stages` name where the stages of a pipeline begin, by
    `scopes`; without, they are cut where their cost on the machine of `profile` balances. For a simulation alone,
    `repeated` writes out only the microbatches that do unlike things, and `samples` takes fewer than the batch has.
    Where placements are `searched` they are those that take least time on `profile` with `memory` bytes a device.
    """
    passes: list[Pass] = [Outline(scopes or {})] if outline else []
    if training is not None and training.masters:
        passes.append(MasterWeights())
    if shardings:
        assert mesh is not None, "shardings are for a mesh"
        passes.append(ApplyShardings(shardings, mesh, names or {}, unused))
    cut: tuple[Pass, ...] = ()
    placed: tuple[Pass, ...] = (ToPlaces(places),) if places > 1 else ()
    if strategy is not None and strategy.microbatches > 1:
        placed = (AccumulateInCalls(), *placed)
    if strategy is not None and strategy.pipeline > 1:
        machine = (profile or load_profile(DEFAULT_PROFILE)).with_devices(strategy.devices)
        count = strategy.pipeline * strategy.chunks
        degrees = (strategy.microbatches, strategy.data)
        shape = (strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)
        limits = _limits(strategy, machine, training)
        cut = (CutStages(count, machine, stages, *degrees, training is not None, samples, scopes or {}, *limits),)
        placed = (Pipeline(*shape, machine),)
    parts = None
    if strategy is not None and (strategy.microbatches > 1 or samples is not None):
        parts = Microbatches(strategy.microbatches, hazards, repeated, samples, training is not None)
    passes += _strategy_passes(strategy, training, cut, parts, profile)
    laying: tuple[Pass, ...] = (Propagate(mesh), DelayReductions(hazards))
    if searched:
        laying = (_by_search(mesh, tail, hazards, strategy, profile, memory),)
    return (*passes, *laying, ToDistIR(tail), *placed, Project(), FuseLocal())


def _by_search(
    mesh: DeviceMesh | None, tail: str, hazards: NonfiniteValues, strategy: Strategy | None, profile: Profile | None,
    memory: float | None,
) -> PlaceBySearch:  # fmt: skip
    """The pass that looks for placements; a program of several stages has the memory of all of them."""
    assert mesh is not None, "placements are looked for on a mesh"
    places = 1 if strategy is None else strategy.pipeline
    machine = merge_stage_devices(profile or load_profile(DEFAULT_PROFILE), places, mesh.size)
    return PlaceBySearch(mesh, machine, tail, None if memory is None else memory * places, hazards)


def _strategy_passes(
    strategy: Strategy | None,
    training: StepOfTraining | None,
    cut: Sequence[Pass],
    parts: Microbatches | None,
    profile: Profile | None,
) -> list[Pass]:
    """What a strategy marks, and the step of training that it is for; a model is `cut` into stages in between, and its
    batch into microbatches, `parts`."""
    passes: list[Pass] = []
    chosen = strategy or Strategy()
    if strategy is not None:
        kept = kept_of(strategy, training)
        passes.append(ApplyStrategy(strategy, training is not None, parts is not None, profile, kept))
        if strategy.sequence_parallel:
            passes.append(SplitSequence(strategy))
        passes += [HoistPositions()] if parts is not None else []
        passes += cut
    if training is not None:
        passes.append(Differentiate(wrt=training.trained, checkpoint=chosen.checkpoint))
        if chosen.zero > 1:
            passes.append(ShardGradients(chosen))
    if parts is not None:
        pipeline = (chosen.schedule, chosen.pipeline, chosen.microbatches, chosen.chunks)
        passes.append(parts)
        # Where placements are looked for, sums over microbatches may stay pending between calls.
        if chosen.placements == "rules" or chosen.mesh.size == 1:
            passes.append(AccumulateInCalls(*(pipeline if chosen.pipeline > 1 else ())))
    if training is not None and chosen.zero == 1:
        passes.append(ShardGradients(chosen))
    if chosen.zero:
        passes.append(GatherParameters(chosen))
    if training is not None:
        passes.append(Optimize(training.optimizer, training.trained, training.clip_norm))
    return passes


def kept_of(strategy: Strategy, training: StepOfTraining | None) -> WeightMemory:
    """What a device keeps of the weights that it works with."""
    return WeightMemory.of(strategy, None if training is None else len(training.optimizer.keeps))


def _limits(
    strategy: Strategy, machine: Profile, training: StepOfTraining | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The speed of each stage, and for how many bytes of weights its devices have memory; nothing where all are alike.

    A device has its part of a stage's weights, as if all were split over the tensor axis.
    """
    shares = Shares.of(machine, strategy)
    if not shares.group_speeds:
        return (), ()
    order = order_of(strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks)
    speeds, rooms = shares.stages(order.rank_of)
    kept = kept_of(strategy, training).total
    return speeds, tuple(room * strategy.tensor / kept for room in rooms)


def as_ranks_run(module: Module) -> Module:
    """A program of the distributed stage with ops fused, as its ranks will run it."""
    return run_passes(module, AS_RANKS_RUN)
