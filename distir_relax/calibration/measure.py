"""Running microbenchmarks: ops on this device, collectives between the ranks of a launch.

All ranks of a launch run the same op at the same time, as they do in a program, so that what they share (memory,
caches) is shared here too. What is returned are the times of single runs: those of several passes are joined before
they are fitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import mean
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.calibration.microbenchmarks import OpSample, payloads
from distir_relax.ir import Op, Value
from distir_relax.kernels import updates
from distir_relax.kernels.packing import pack_linear
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup, torch_expression, torch_in_place
from distir_relax.runtime.rank_session import RankSession
from distir_relax.runtime.training.batches import numbers
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

# What a benchmark takes at least, in seconds: less would be the clock's own noise.
_ENOUGH = 4e-3
_ROUNDS = 2
WARM_UP = 2
"""Steps of a program that run before those that count."""
# Operands that a program reads once are taken in turn from so many bytes, more than caches hold.
_COLD = 96e6
_MOST_COPIES = 800
# Elements of the tensor that ranks go over between two communications.
_BETWEEN = 1 << 20


@dataclass(frozen=True)
class CollectiveSample:
    """A communication of `bytes` over `ranks` devices. `bytes` is what `network.collective_seconds` counts."""

    collective: str
    ranks: int
    bytes: int


def time_op(sample: OpSample, device: str, wait: Callable[[], None], limit: float = math.inf) -> list[float]:
    """The seconds that one op takes, in a row of many as in a program, a few times. `wait` is called before each.

    What counts are a few rounds of runs that take `limit` seconds together, or of one run each.
    """
    import torch
    import torch.nn.functional as F

    generator = torch.Generator(device=device).manual_seed(0)
    variants = [[_draw(kind, device, generator) for kind in sample.operands]]
    if sample.cold:
        far = [i for i, is_far in enumerate(sample.far[: len(sample.operands)]) if is_far]
        copies = int(_COLD / max(1, sum(sample.operands[i].bytes for i in far)))
        for _ in range(max(1, min(_MOST_COPIES, copies)) - 1):
            variants.append(list(variants[0]))
            for i in far:
                variants[-1][i] = variants[0][i].clone()
    names = [f"a{i}" for i in range(len(sample.operands))]
    scope: dict[str, Any] = {"torch": torch, "F": F, "pack_linear": pack_linear, "updates": updates}
    form = lookup(sample.op).code.packed
    if sample.fixed and form is not None:
        rows = sample.results[0].elements // sample.results[0].shape[-1]
        for variant in variants:
            packed = eval(form.prepare.format(*names, rows=rows), {**scope, **dict(zip(names, variant, strict=True))})
            variant[form.weights[0]] = packed
        code = form.apply.format(*names, packed=names[form.weights[0]])
    else:
        values = tuple(Value(name, kind) for name, kind in zip(names, sample.operands, strict=True))
        op = Op(sample.op, values, (), sample.attrs)
        code = torch_in_place(op, names) or torch_expression(op, names)
    exec(f"def run({', '.join(names)}):\n    return {code}\n", scope)
    run = scope["run"]
    turns = cycle(variants)

    def repeat(times: int) -> float:
        _settle(device)
        wait()
        start = time.perf_counter()
        for _ in range(times):
            run(*next(turns))
        _settle(device)
        return (time.perf_counter() - start) / times

    with torch.inference_mode():
        repeat(2)
        once = max(1e-7, repeat(2))
        times = steps_within(limit / _ROUNDS, once, max(2, min(4000, int(_ENOUGH / once))))
        return [repeat(times) for _ in range(_ROUNDS)]


def time_ops(
    samples: Sequence[OpSample], device: str, world: World | None, limit: float = math.inf
) -> list[list[float]]:
    """The seconds of each op, measured a few times, on this rank. Every rank calls this at the same time.

    `limit` is what an op may take, in seconds.
    """
    wait = (lambda: None) if world is None else (lambda: _meet(world))
    return [time_op(sample, device, wait, limit) for sample in samples]


def time_collectives(
    world: World, device: str, scale: int, limit: float = math.inf
) -> list[tuple[CollectiveSample, list[float]]]:
    """All collectives over all ranks of a launch, and over parts of it, each timed several times.

    Every rank calls this, with the same `limit`, the seconds for one of them.
    """
    found = []
    for count in (n for n in range(2, world.size + 1) if world.size % n == 0):
        comm = world.communicator(DeviceMesh((world.size // count, count), ("apart", "together")), device)
        for elements in payloads(scale):
            for collective, held, messages, run in _collectives(comm, count, elements, device):
                seconds = [t / messages for t in _time_together(world, run, device, limit)]
                found.append((CollectiveSample(collective, count, held), seconds))
    return found


def time_steps(world: World, session: RankSession, steps: int, limit: float = math.inf) -> list[float]:
    """The seconds of steps on random inputs, each as long as it is on the slowest rank. Every rank calls this.

    There are `steps`, or as many as fit in `limit` seconds, one at least.
    """
    inputs = random_inputs(session.bundle.manifest)
    seconds: list[float] = []

    def run(times: int) -> None:
        for _ in range(times):
            # The collection of outputs on rank 0 is not timed, and would leave it behind the others.
            session(inputs, outputs=())
            seconds.append(session.seconds)

    run(WARM_UP)
    run(steps_within(limit, max(world.exchange(seconds[-1])), steps))
    return [max(column) for column in zip(*world.exchange(seconds), strict=True)][WARM_UP:]


def steps_within(limit: float, seconds: float, most: int) -> int:
    """How many steps of so many seconds fit in a limit: `most` at most, one at least."""
    return most if seconds * most <= limit else max(1, int(limit / seconds))


def random_inputs(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Numbers for each input: small ones where they may be indices, and of a step of training its own rate and seed."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = {}
    for tensor in manifest.inputs:
        dtype = getattr(torch, tensor.dtype)
        if dtype.is_floating_point:
            found[tensor.name] = torch.randn(tensor.shape, generator=generator).to(dtype)
        else:
            found[tensor.name] = torch.randint(0, 2, tensor.shape, generator=generator).to(dtype)
    return found if manifest.training is None else {**found, **numbers(manifest, 0)}


def _collectives(
    comm: Communicator, count: int, elements: int, device: str
) -> Iterator[tuple[str, int, int, Callable[[], object]]]:
    """Each collective, the bytes that count for it, how many messages one run of it is, and the run itself."""
    import torch

    sizes = [elements // count + (i < elements % count) for i in range(count)]
    index = comm.mesh.coordinates(comm.rank)[1]
    x = torch.ones(elements, dtype=torch.float32, device=device)
    part = x[: sizes[index]].contiguous()
    peer = comm.rank ^ 1
    yield "all_reduce", 4 * elements, 1, lambda: comm.all_reduce(x, "together", "sum")
    yield "all_gather", 4 * elements, 1, lambda: comm.all_gather(part, "together", 0, sizes)
    yield "reduce_scatter", 4 * elements, 1, lambda: comm.reduce_scatter(x, "together", 0, sizes, "sum")
    square = x[: elements - elements % count].view(count, -1)
    columns = square.shape[1]
    split = [columns // count + (i < columns % count) for i in range(count)]
    yield "all_to_all", square.numel() * 4, 1, lambda: comm.all_to_all(square, "together", 1, split, 0, [count] * count)
    if count == 2:

        def there_and_back() -> None:
            if comm.rank < peer:
                comm.send(x, peer)
                comm.recv((elements,), "float32", peer)
            else:
                comm.recv((elements,), "float32", peer)
                comm.send(x, peer)

        yield "send", 4 * elements, 2, there_and_back


def _time_together(world: World, run: Callable[[], object], device: str, limit: float) -> list[float]:
    """The seconds of a communication as it is in a program: after work that takes ranks unlike times and leaves other
    data in the caches. Each is the mean over ranks, one of which waits for the other.
    """
    import torch

    between = torch.ones(_BETWEEN, device=device)

    def repeat(times: int) -> list[float]:
        _meet(world)
        taken = []
        for _ in range(times):
            between.add_(1.0)
            _settle(device)
            start = time.perf_counter()
            run()
            _settle(device)
            taken.append(time.perf_counter() - start)
        return taken

    repeat(3)
    once = max(1e-7, *world.exchange(mean(repeat(5))))
    times = steps_within(limit, once, max(8, min(200, int(4 * _ENOUGH / once))))
    return [mean(column) for column in zip(*world.exchange(repeat(times)), strict=True)]


def _meet(world: World) -> None:
    world.exchange(0)


def _settle(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def _draw(kind: Any, device: str, generator: torch.Generator) -> torch.Tensor:
    import torch

    dtype = getattr(torch, kind.dtype)
    # Roots and logarithms of what is below 0 may take a slow way.
    return torch.randn(kind.shape, generator=generator, device=device).abs().to(dtype)
