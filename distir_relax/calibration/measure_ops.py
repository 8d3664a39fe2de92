"""Steps of a bundle, run with a clock after each op (`kernels.clock`) on inputs that are drawn, to measure its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.calibration.limits import Limits, measure_limits
from distir_relax.calibration.measure import random_inputs, synchronize
from distir_relax.calibration.op_times import Marks, OpTimes, StepTimes, step_times
from distir_relax.errors import RunError
from distir_relax.ir import Op
from distir_relax.ir.symbols import op_symbols
from distir_relax.kernels.clock import take_marks, wait_with
from distir_relax.lowering.emit.torch import to_torch_clocked
from distir_relax.runtime.call_shapes import CallShapes
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.requests import RankRequests, Slot
from distir_relax.runtime.requests.request_program import emit_request_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.verification import read_stage
from distir_relax.runtime.world import ALONE, World

if TYPE_CHECKING:
    from distir_relax.lowering.emit.torch_function import ClockedOp

_WARM_UP = 3
_TOKEN = 1


def measure_op_times(
    bundle: Bundle, world: World = ALONE, device: str = "cpu", steps: int = 20, tokens: int = 128,
    requests: int = 1,
) -> OpTimes:  # fmt: skip
    """Run `steps` steps of a bundle; return the times of this rank's ops, and the limits of its device.

    A program that generates text reads prompts of so many `tokens` for some `requests`, and then makes a token for each
    in a step. Without a launch the bundle is of one rank. All ranks of a launch call this together.

    Raises `RunError` for a bundle of several ranks without a launch, and as sessions do.
    """
    if world.is_alone and bundle.manifest.mesh.size > 1:
        raise RunError(f"expected a launch of {bundle.manifest.mesh.size} ranks, or a bundle of one")
    own = rank_device(device, world.local_rank)
    if own != "cpu":
        wait_with(partial(synchronize, own))
    before = measure_limits(own)
    if bundle.manifest.states:
        rows = _run_requests(bundle, world, own, steps, tokens, requests)
    else:
        rows = _run_steps(bundle, world, own, steps)
    # Again: other work of the machine may have slowed the first one.
    limits = before.best(measure_limits(own))
    return OpTimes(limits, [row(limits) for row in rows])


_Rows = list[Callable[[Limits], StepTimes]]


def _run_steps(bundle: Bundle, world: World, device: str, steps: int) -> _Rows:
    """Time the steps of a program that keeps nothing between them."""
    manifest = bundle.manifest
    program = manifest.program_of(world.rank)
    text, ops = to_torch_clocked(read_stage(bundle, "ranked"), program.name, manifest.name)
    path = f"programs/{program.name}.py"
    programs = tuple(replace(p, torch=path) if p == program else p for p in manifest.programs)
    timed = replace(
        bundle, manifest=replace(manifest, programs=programs), programs={**bundle.programs, path: text}, path=None
    )
    sizes = {symbol.name: symbol.typical for symbol in manifest.symbols}
    inputs = random_inputs(CallShapes(manifest).at(sizes).manifest)
    session = Session(timed, device=device, world=world)
    marks = [_marks(partial(session, inputs, outputs=())) for _ in range(_WARM_UP + steps)][_WARM_UP:]
    what = ", ".join(["a step", *(f"{name} = {size}" for name, size in sizes.items())])
    return [partial(step_times, what, ops, marks, lambda op: (sizes, 1))]


def _run_requests(bundle: Bundle, world: World, device: str, steps: int, tokens: int, requests: int) -> _Rows:
    """Time the steps that read prompts, and those that make a token for each request."""
    ops = list["ClockedOp"]()
    comm = Session(bundle, device=device, world=world, loads=False).communicator
    entry = read_stage(bundle, "ranked").ranks[comm.rank]
    ranks = RankRequests(bundle, emit_request_programs(bundle, [entry], {entry: ops}), comm)
    turns, length = range(_WARM_UP + steps), tokens + _WARM_UP + steps + 1

    def read_prompts(turn: int) -> None:
        slots = [Slot(turn * requests + n, 0, [_TOKEN] * tokens, 1, length) for n in range(requests)]
        ranks.step(slots, range((turn - 1) * requests, turn * requests) if turn else ())

    def make_tokens(turn: int) -> None:
        first = turns[-1] * requests
        ranks.step([Slot(first + n, tokens + turn, [_TOKEN], 1, length) for n in range(requests)])

    read = [_marks(partial(read_prompts, turn)) for turn in turns][_WARM_UP:]
    made = [_marks(partial(make_tokens, turn)) for turn in turns][_WARM_UP:]
    each = "" if requests == 1 else f" for each of {requests} requests"
    read_sizes = partial(_sizes_of_requests, new=tokens, past=0, requests=requests)
    made_sizes = partial(_sizes_of_requests, new=1, past=tokens + _WARM_UP + steps // 2, requests=requests)
    return [
        partial(step_times, f"{tokens} tokens{each}", ops, read, read_sizes),
        partial(step_times, f"one token{each} after {tokens}", ops, made, made_sizes),
    ]


def _sizes_of_requests(op: Op, new: int, past: int, requests: int) -> tuple[Mapping[str, int], int]:
    """Return the sizes of an op in a step of requests, and how often it runs with them.

    An op that sees earlier positions runs for each request, any other once for the rows of all.
    """
    if any(symbol.name == "past" for symbol in op_symbols(op)):
        return {"new": new, "last": 1, "past": past}, requests
    return {"new": requests * new, "last": requests, "past": past}, 1


def _marks(run: Callable[[], object]) -> Marks:
    """Run a step; return what its clock recorded."""
    take_marks()
    run()
    return take_marks()
