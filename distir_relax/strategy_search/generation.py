"""Search for the best strategy to generate text: `dr.search_generation`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from distir_relax.compiler.compile import Plan
from distir_relax.compiler.generation import Generation, read_generation
from distir_relax.compiler.options import CompileOptions, complete
from distir_relax.compiler.simulate_generation import (
    GenerationSimulation,
    call_generation,
    reject_precision,
    simulate_generation,
)
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.serving import EngineOptions
from distir_relax.strategies.strategy import Strategy

OBJECTIVES: dict[str, Callable[[GenerationSimulation], float]] = {
    "throughput": lambda found: found.seconds,
    "first-token": lambda found: fmean(found.first_token),
    "per-token": lambda found: fmean(found.per_token or (0.0,)),
}
"""What a search minimizes, by name; the time of all requests is least where the throughput is highest."""


@dataclass(frozen=True)
class GenerationOutcome:
    """A strategy for `replicas` copies of the model, and the simulation of the copy with the most requests.

    `throughput` is that of all copies together, in tokens per second. Without a simulation, `refused` says why there is
    none. Of unlike devices, `devices` are those that run the model, in order; if it is empty, all
    in the order of the profile.
    """

    strategy: str
    replicas: int
    throughput: float = 0.0
    simulation: GenerationSimulation | None = None
    refused: str = ""
    devices: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the strategy compiles and fits into memory."""
        return self.simulation is not None and self.simulation.fits

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers and texts, for JSON."""
        found = {} if self.simulation is None else self.simulation.as_json()
        return found | {
            "strategy": self.strategy, "replicas": self.replicas, "throughput": self.throughput, "fits": self.fits,
            "refused": self.refused, "devices": list(self.devices),
        }  # fmt: skip


@dataclass(frozen=True)
class GenerationSearch:
    """Outcomes of a search: `ranked` has those that fit, the best first. `seconds` is what the search took."""

    objective: str
    profile: str
    devices: int
    outcomes: tuple[GenerationOutcome, ...]
    seconds: float

    @property
    def ranked(self) -> list[GenerationOutcome]:
        """Those that fit, the best first; of equals, the one with the fewest replicas."""
        cost = OBJECTIVES[self.objective]
        fitting = [(cost(o.simulation), o.replicas, o) for o in self.outcomes if o.simulation is not None and o.fits]
        return [outcome for _, _, outcome in sorted(fitting, key=lambda item: item[:2])]

    @property
    def too_large(self) -> list[GenerationOutcome]:
        """Those that compile, and do not fit into memory."""
        return [outcome for outcome in self.outcomes if outcome.simulation is not None and not outcome.fits]

    @property
    def refused(self) -> list[GenerationOutcome]:
        """Those that have no simulation."""
        return [outcome for outcome in self.outcomes if outcome.refused]


def search_generation(
    model: Any,
    *,
    devices: int,
    profile: Profile | str | Path,
    prompt: int,
    generate: int,
    requests: int = 16,
    objective: str = "throughput",
    options: EngineOptions | None = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
) -> GenerationSearch:
    """Simulate generation under every strategy for `devices`, and rank those that fit in memory by an objective.

    `model` is what `compile_generation` takes, or ``file.py:function``: a function that returns a `Generation` for its
    parameter `strategy`. All R x T x P = `devices` are tried: R replicas, among which requests are divided evenly, of
    T tensor-parallel ranks in each of P pipeline stages. If the devices of the profile differ, there is one replica, on
    all of them or on the fastest alone; stages are also tried with the slowest and the fastest devices first, if all
    links are alike.

    `precision` and `keep` are those of `compile_generation`, of a model that is not compiled yet.
    The workload, and the engine's `options`, are those of `simulate_generation`. `objective` is ``throughput``, the
    mean time to the ``first-token``, or the mean time ``per-token`` after it.

    Raises a `DistIRError` for another objective, a profile of fewer devices, and as reading the model does. A strategy
    that the model does not support, or whose limits suffice for no request, is no error: its outcome is `refused`.
    """
    machine = as_profile(profile)
    if objective not in OBJECTIVES:
        raise DistIRError(f"expected an objective of {', '.join(OBJECTIVES)}, found {objective!r}")
    if min(devices, prompt, generate, requests) < 1:
        raise DistIRError("expected numbers of devices, tokens and requests of at least 1")
    if machine.devices < devices:
        raise DistIRError(
            f"{devices} devices were requested, the profile {machine.name} has {machine.devices}",
            hint="give a profile of more devices or nodes: NAME:NODES",
        )
    start = time.monotonic()
    compiled = _compiler(model, precision, keep)
    outcomes = []
    for replicas, strategy, order in _candidates(devices, machine):
        most = -(-requests // replicas)
        ordered = machine.reordered(order) if order else machine
        try:
            found = simulate_generation(
                compiled(strategy, ordered), profile=ordered.of_one_device() if len(order) == 1 else ordered,
                prompt=prompt, generate=generate, requests=most, options=options,
            )  # fmt: skip
        except ImportModelError:
            # Of the model, not of a strategy.
            raise
        except DistIRError as error:
            outcome = GenerationOutcome(str(strategy), replicas, refused=error.message, devices=order)
        else:
            throughput = requests * generate / found.seconds if found.seconds else 0.0
            outcome = GenerationOutcome(str(strategy), replicas, throughput, found, devices=order)
        outcomes.append(outcome)
    return GenerationSearch(objective, machine.name, devices, tuple(outcomes), time.monotonic() - start)


def _candidates(devices: int, machine: Profile) -> Iterator[tuple[int, Strategy, tuple[int, ...]]]:
    """Yield numbers of replicas, the strategy of each, and the order of its devices, if it is not theirs."""
    by_speed = sorted(range(devices), key=machine.speed_of)
    orders = dict.fromkeys((tuple(by_speed), tuple(by_speed[::-1]))) if machine.groups else {}
    orders.pop(tuple(range(devices)), None)
    for ranks in range(1, devices + 1):
        if devices % ranks == 0 and (not machine.groups or ranks == devices):
            for tensor in range(ranks, 0, -1):
                if ranks % tensor == 0:
                    yield devices // ranks, Strategy(1, tensor, ranks // tensor), ()
                    for order in orders if tensor < ranks and len(machine.levels) == 1 else ():
                        yield devices // ranks, Strategy(1, tensor, ranks // tensor), order
    if machine.groups and devices > 1:
        yield 1, Strategy(1, 1, 1), (by_speed[-1],)


def _compiler(
    model: Any, precision: str | None, keep: Sequence[str]
) -> Callable[[Strategy, Profile], Generation | Plan]:
    """Return a function that compiles a model under a strategy for a machine; the model is read once."""
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        reject_precision(precision, keep, str(model))
        return lambda strategy, profile: call_generation(str(model), strategy)
    source = read_generation(model, precision=precision, keep=keep)
    return lambda strategy, profile: source.compile(
        complete(CompileOptions(strategy=strategy, profile=profile), source.name)
    )
