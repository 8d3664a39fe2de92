"""Simulation of generation for many requests: `dr.simulate_generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from distir_relax.bundle import Manifest, read_bundle
from distir_relax.compiler.compile import Plan
from distir_relax.compiler.generation import Generation, compile_generation
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.virtual_engine import StepTime, VirtualRun, Workload, run_virtually
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.pretrained import is_pretrained
from distir_relax.frontends.pretrained_language_model import is_gguf
from distir_relax.ir import Module
from distir_relax.lowering import OneSequence, Project
from distir_relax.runtime.generation import LanguageProgram
from distir_relax.runtime.requests import StateBytes, pipeline_depth
from distir_relax.runtime.verification import read_stage
from distir_relax.serving import EngineOptions
from distir_relax.simulation.footprint import footprint
from distir_relax.simulation.op_timer import FEMTOSECONDS
from distir_relax.simulation.request_steps import Chunk, RequestSteps
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategies.strategy import Strategy, as_strategy
from distir_relax.support.units import count, rate, seconds, size
from distir_relax.support.user_function import call_function, find_function


@dataclass(frozen=True, repr=False)
class GenerationSimulation:
    """Predicted generation for `requests` that arrive together. Times are seconds, sizes bytes.

    `first_token` has for each request the time from its arrival to its first token, `per_token` the mean time between
    the next ones, None for requests of one token. `steps` is the number of steps of the engine, and `simulated` that of
    different ones. For each rank, `idle` is the share of the time between its steps, the bubble of a pipeline,
    `weights` are its weights, `cache` the most that states of requests take, and `memory` what the device has. It
    prints as a summary of four or five lines.
    """

    profile: str
    prompt: int
    generate: int
    requests: int
    seconds: float
    steps: int
    simulated: int
    first_token: tuple[float, ...]
    per_token: tuple[float, ...] | None
    idle: tuple[float, ...]
    weights: tuple[int, ...]
    cache: tuple[int, ...]
    memory: tuple[float, ...]

    @property
    def throughput(self) -> float:
        """Generated tokens per second, of all requests."""
        return self.requests * self.generate / self.seconds if self.seconds else 0.0

    @property
    def fits(self) -> bool:
        """Whether weights and states fit into the memory of each device; activations are not counted."""
        return all(w + c <= most for w, c, most in zip(self.weights, self.cache, self.memory, strict=True))

    def __repr__(self) -> str:
        rank = max(range(len(self.cache)), key=lambda r: (self.weights[r] + self.cache[r]) / self.memory[r])
        where = f" on rank {rank}" if len(self.cache) > 1 else ""
        need = self.weights[rank] + self.cache[rank]
        return "\n".join(
            [
                f"on {self.profile}: {seconds(self.seconds)} for {count(self.requests, 'request')} of {self.prompt} + "
                f"{count(self.generate, 'token')} on {count(len(self.cache), 'device')}, "
                f"{rate(self.throughput).removesuffix('/s')} tokens/s",
                f"first token  {seconds(fmean(self.first_token))} on average, at most {seconds(max(self.first_token))}",
                *self._per_token_line(),
                f"memory       weights {size(self.weights[rank])}, cache {size(self.cache[rank])}{where}",
                f"steps        {self.steps:,}, {self.simulated:,} of them simulated{self._idle_text()}",
                *([] if self.fits else [f"does not fit: {size(need)} of {size(self.memory[rank])}{where}"]),
            ]
        )

    def _idle_text(self) -> str:
        return f"; devices are idle {fmean(self.idle):.0%} of the time" if max(self.idle) >= 0.005 else ""

    def _per_token_line(self) -> list[str]:
        times = self.per_token
        return [f"each token   {seconds(fmean(times))} on average, at most {seconds(max(times))}"] if times else []

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain numbers and lists, for JSON."""
        return {
            "profile": self.profile,
            "prompt": self.prompt,
            "generate": self.generate,
            "requests": self.requests,
            "seconds": self.seconds,
            "throughput": self.throughput,
            "steps": self.steps,
            "simulated": self.simulated,
            "first_token_s": list(self.first_token),
            "per_token_s": None if self.per_token is None else list(self.per_token),
            "idle": list(self.idle),
            "weight_bytes": list(self.weights),
            "cache_bytes": list(self.cache),
            "memory_bytes": list(self.memory),
            "fits": self.fits,
        }


def simulate_generation(
    model: Any,
    *,
    profile: Profile | str | Path,
    prompt: int,
    generate: int,
    requests: int = 1,
    options: EngineOptions | None = None,
    strategy: Strategy | str | None = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
) -> GenerationSimulation:
    """Predict an engine's run on a machine: time to first token, time per token, throughput, memory of states.

    `model` is a `Generation`, its plan, the path of a bundle of it, or ``file.py:function``, which returns one of the
    first two, and receives `strategy` if it has this parameter. Or it is the path of a model that `compile_generation`
    takes, which is compiled with `strategy`, by default for one device, and with `precision` and `keep`. `requests` of
    `prompt` tokens arrive together, and `generate` tokens are generated for each; they have no tokens in common, and
    nothing is drafted. `profile` is the name or path of a profile, or a `Profile`; `options` are those of the engine.

    Raises a `DistIRError`: `ProfileError` for the profile, `RunError` for a program that does not continue sequences
    and for requests that are too long for it or for the memory, and what reading the bundle or compiling the model
    raises.
    """
    machine = as_profile(profile)
    limits = {"prompt": prompt, "generate": generate, "requests": requests}
    for name, number in limits.items():
        if number < 1:
            raise DistIRError(f"expected {name} of at least 1, found {number}")
    manifest, module = _load(model, strategy, precision, keep)
    language = LanguageProgram.for_requests(manifest)
    language.check_length(prompt, generate)
    longest = language.max_length
    steps = request_steps(module, manifest, machine.kind == "cpu")
    timer = _StepTimer(steps, machine, longest)
    engine = (options or EngineOptions()).limits(manifest, longest)
    run = run_virtually(Workload(requests, prompt, generate), engine, pipeline_depth(manifest), timer)
    return _result(run, timer, manifest, Workload(requests, prompt, generate))


def request_steps(module: Module, manifest: Manifest, packed: bool = True) -> RequestSteps:
    """Return the steps of requests of a distributed program with growing states; CPUs have `packed` weights."""
    states = {state.tensor.name: state.output for state in manifest.states}
    return RequestSteps(OneSequence().run(fuse_for_ranks(module)), states, packed)


def call_generation(target: str, strategy: Strategy | None) -> Generation | Plan:
    """Call a function ``FILE.py:FUNCTION`` that compiles a model. Raises ImportModelError unless that is its result."""
    found = call_function(find_function(target), target, {"strategy": strategy}, ("strategy",))
    if not isinstance(found, (Generation, Plan)):
        raise ImportModelError(
            f"expected a function of a strategy that returns a Generation, found {type(found).__name__}", target
        )
    return found


def reject_precision(precision: str | None, keep: Sequence[str], where: str) -> None:
    """Raise `DistIRError` for a precision of a model that a function or a bundle has compiled."""
    if precision is not None or keep:
        raise DistIRError(
            "a precision cannot be applied to a model that is compiled already", where,
            "give the folder or GGUF file of the model",
        )  # fmt: skip


def _load(
    model: Any, strategy: Strategy | str | None, precision: str | None, keep: Sequence[str]
) -> tuple[Manifest, Module]:
    """Return the manifest of a model, and its program of the distributed stage."""
    if isinstance(model, (str, Path)) and (is_gguf(model) or is_pretrained(model)):
        model = compile_generation(model, strategy=strategy or "1/1/1/1", precision=precision, keep=keep).plan
        return model.bundle(()).manifest, model.modules["distributed"]
    reject_precision(precision, keep, str(model) if isinstance(model, (str, Path)) else "")
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        model = call_generation(str(model), None if strategy is None else as_strategy(strategy))
    elif strategy is not None:
        raise DistIRError(
            "a strategy cannot be applied to a program that is distributed already",
            hint="give the folder or GGUF file of the model, or FILE.py:FUNCTION that returns a Generation",
        )
    if isinstance(model, Generation):
        model = model.plan
    if isinstance(model, Plan):
        return model.bundle(()).manifest, model.modules["distributed"]
    if not isinstance(model, (str, Path)):
        raise DistIRError(f"expected a Generation, a Plan or the path of a bundle, found {type(model).__name__}")
    bundle = read_bundle(Path(model), verify_weights=False)
    LanguageProgram.for_requests(bundle.manifest)
    return bundle.manifest, read_stage(bundle, "distributed")


@dataclass
class _StepTimer:
    """Simulates steps, each composition once; requests of equally many rows count as equal, with their mean `past`.

    The time of a step grows linearly with the positions before it, so their sum counts. The mean, and the number of
    such requests, are rounded to four significant binary digits.
    """

    steps: RequestSteps
    profile: Profile
    longest: int | None
    times: dict[tuple[tuple[Chunk, int], ...], StepTime] = field(default_factory=dict)

    def __call__(self, chunks: Sequence[Chunk]) -> StepTime:
        groups: dict[tuple[int, int], list[int]] = {}
        for chunk in chunks:
            groups.setdefault((chunk.new, chunk.last), []).append(chunk.past)
        counts = {Chunk(self._past(pasts, new), new, last): len(pasts) for (new, last), pasts in groups.items()}
        rounded = {chunk: _rounded(number) for chunk, number in counts.items()}
        # With rounded numbers a step may have more rows than the program takes.
        if self.longest is not None and sum(c.new * n for c, n in rounded.items()) > self.longest:
            rounded = counts
        key = tuple(sorted(rounded.items(), key=lambda item: astuple(item[0])))
        if key not in self.times:
            self.times[key] = _step_time(self.steps.program(dict(key)).simulate(self.profile))
        return self.times[key]

    def _past(self, pasts: Sequence[int], new: int) -> int:
        past = _rounded(fmean(pasts))
        return past if self.longest is None else min(past, self.longest - new)


def _rounded(number: float) -> int:
    """Round to four significant binary digits."""
    unit = 1 << max(0, int(number).bit_length() - 4)
    return round(number / unit) * unit


def _step_time(simulation: Simulation) -> StepTime:
    """Return the time of a step; transfers on a stream, besides a device's own ops, keep it from no other step."""
    begins, ends = np.full(len(simulation.members), np.inf), np.full(len(simulation.members), -np.inf)
    for event, start in simulation.events():
        if event.duration and not event.stream:
            classes = list(event.classes)
            begins[classes] = np.minimum(begins[classes], start / FEMTOSECONDS)
            ends[classes] = np.maximum(ends[classes], (start + event.duration) / FEMTOSECONDS)
    return StepTime(simulation.makespan, begins[simulation.class_of], ends[simulation.class_of])


def _result(run: VirtualRun, timer: _StepTimer, manifest: Manifest, workload: Workload) -> GenerationSimulation:
    more = workload.generate - 1
    ranks = range(manifest.mesh.size)
    bytes_of = StateBytes(manifest)
    total = max(times[-1] for times in run.times)
    busy = np.broadcast_to(np.asarray(run.busy), manifest.mesh.size)
    return GenerationSimulation(
        profile=timer.profile.name,
        prompt=workload.prompt,
        generate=workload.generate,
        requests=workload.requests,
        seconds=total,
        steps=run.steps,
        simulated=len(timer.times),
        first_token=tuple(times[0] for times in run.times),
        per_token=tuple((times[-1] - times[0]) / more for times in run.times) if more else None,
        idle=tuple(float(1 - seconds / total) if total else 0.0 for seconds in busy),
        weights=footprint(timer.steps.single, Project().run(timer.steps.single)).weights,
        cache=tuple(max(sum(bytes_of(rank, length) for length in held) for held in run.held) for rank in ranks),
        memory=tuple(timer.profile.memory_of(rank) for rank in ranks),
    )
