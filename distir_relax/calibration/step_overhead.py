"""The host's time around a program: of a call, and of a step of text generation with some requests.

Programs that hardly compute are run as those of users are: a call of a session, and steps in which requests get one
token each. What their ops do not take is the time around them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from distir_relax.bundle import Bundle, read_bundle, write_bundle
from distir_relax.calibration.measure import WARM_UP, steps_within, time_steps
from distir_relax.calibration.models import example, feed_forward_model, language_model
from distir_relax.compiler.compile import compile
from distir_relax.compiler.generation import compile_generation
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.simulate_generation import request_steps
from distir_relax.cost.profile import Profile
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.requests import RankRequests, Slot
from distir_relax.runtime.requests.request_program import emit_request_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.world import World
from distir_relax.simulation.request_steps import Chunk, StepProgram
from distir_relax.strategies.strategy import Strategy

REQUESTS = (1, 9)
"""The numbers of requests of the steps that are timed."""

_STEPS = 60
_WIDTH, _ROWS = 48, 5
# Tokens before those of a step.
_PAST = 3
_TOKEN = 1
# The files of the two bundles.
_CALL, _GENERATION = "step-call.dist", "step-generation.dist"


def step_samples(ranks: int) -> tuple[StepProgram, ...]:
    """Return the programs in the order of `time_step_samples`: a call, and steps of `REQUESTS` requests."""
    return _compiled(ranks)[0]


def write_step_samples(folder: Path, ranks: int) -> None:
    """Write the bundles of the programs on `ranks` ranks, for `time_step_samples`."""
    for name, bundle in zip((_CALL, _GENERATION), _compiled(ranks)[1], strict=True):
        write_bundle(bundle, folder / name)


def time_step_samples(folder: Path, world: World, limit: float = math.inf) -> list[list[float]]:
    """Return the seconds of steps of each program, as on the slowest rank. All ranks call this together, with the same
    `limit`, the seconds for the steps of a program."""
    session = Session(read_bundle(folder / _CALL, verify_weights=False), world=world)
    generation = read_bundle(folder / _GENERATION, verify_weights=False)
    return [
        time_steps(world, session, _STEPS, limit),
        *(time_requests(world, generation, "cpu", _STEPS, n, 1, _PAST, limit) for n in REQUESTS),
    ]


def time_requests(
    world: World, bundle: Bundle, device: str, steps: int, requests: int, new: int, past: int, limit: float = math.inf
) -> list[float]:
    """Return the seconds of steps of text generation, as on the slowest rank: as many as `steps`, or as fit in `limit`.

    Each of `requests` computes `new` tokens after `past`. A step is taken back by the next one, which has as many
    tokens before it. All ranks call this together.
    """
    comm = world.communicator(bundle.manifest.mesh, rank_device(device, world.local_rank))
    ranks = RankRequests(bundle, emit_request_programs(bundle), comm)
    slots = [Slot(number, past, [_TOKEN] * new, 1, past + new) for number in range(requests)]
    if past:
        for number in range(requests):
            ranks.step([Slot(number, 0, [_TOKEN] * past, 1, past + new)])

    def run(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            world.exchange(0)
            start = time.perf_counter()
            ranks.step(slots)
            seconds.append(time.perf_counter() - start)
        return [max(column) for column in zip(*world.exchange(seconds), strict=True)]

    return run(steps_within(limit, run(WARM_UP)[-1], steps))


def fit_steps(profile: Profile, samples: Sequence[StepProgram], seconds: Sequence[float]) -> Profile:
    """Return the profile with the time around programs: `seconds` are those of the samples."""
    bare = replace(profile, step=0.0, request_step=0.0, request=0.0)
    call, *steps = (max(0.0, t - s.simulate(bare).makespan) for s, t in zip(samples, seconds, strict=True))
    each = max(0.0, (steps[1] - steps[0]) / (REQUESTS[1] - REQUESTS[0]))
    return replace(profile, step=call, request_step=max(0.0, steps[0] - REQUESTS[0] * each), request=each)


@cache
def _compiled(ranks: int) -> tuple[tuple[StepProgram, ...], tuple[Bundle, ...]]:
    strategy = Strategy(tensor=ranks)
    plan = compile(
        feed_forward_model(2, _WIDTH * ranks, "float32").eval(), (example((_ROWS, _WIDTH * ranks), "float32"),),
        strategy=strategy, name="a call",
    )  # fmt: skip
    generation = compile_generation(language_model(ranks), strategy=strategy).plan
    bundle = generation.bundle(("torch",))
    steps = request_steps(generation.modules["distributed"], bundle.manifest)
    samples = [
        StepProgram(fuse_for_ranks(plan.modules["distributed"])),
        *(steps.program({Chunk(_PAST, 1, 1): number}) for number in REQUESTS),
    ]
    return tuple(samples), (plan.bundle(("torch",)), bundle)
