"""Microbenchmarks: ops on this device, collectives between the ranks of a launch.

All ranks of a launch run the same op at the same time, as in a program, so that they share memory and caches as there.
The results are times of single runs; those of several passes are merged before the fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import mean
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.calibration.microbenchmarks import OpSample, payloads
from distir_relax.ir import Op, Value
from distir_relax.kernels.attention import RequestsAttention
from distir_relax.kernels.packing import pack_joined, pack_linear
from distir_relax.kernels.quantized.linear import pack_quantized
from distir_relax.kernels.recorded_requests import RecordedRequests
from distir_relax.kernels.recording import Recording
from distir_relax.kernels.requests import Request, States
from distir_relax.layout import DeviceMesh
from distir_relax.ops import is_packable, packing_of, torch_kernel, torch_packing, torch_scope
from distir_relax.runtime.recorded_communicator import RecordedCommunicator
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.batches import numbers
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

# Minimum time of a benchmark in seconds, well above the resolution of the clock.
_MIN_SECONDS = 4e-3
_ROUNDS = 2
HOST, NETWORK = "host", "network"
"""The levels of several hosts."""
WARM_UP = 5
"""Untimed steps before the timed ones of a program: those before it is a recorded step
(`runtime.backends.recorded_calls`), and one more."""
# Operands that a program reads once are cycled through this many bytes, more than caches hold.
_COLD_BYTES = 96e6
_MAX_COPIES = 800
# The side of the matrices in the work by which ranks are compared, how often it is repeated, and measured.
_RANK_SIDE, _RANK_REPEATS, _RANK_ROUNDS = 256, 100, 7
# The side of weights that are read in turn, how often, and the largest cache whose size is measured, in bytes.
_READ_SIDE, _READ_ROUNDS, _MOST_CACHE = 700, 7, 96e6
# Elements of the tensor that ranks update between two communications.
_BETWEEN = 1 << 20
# Bytes of the largest all-reduce that is measured in recorded programs: these have small results.
_MOST_RECORDED = 1 << 20
# Calls of an op in a recorded step.
_CALLS = 20
_PACKING = {"pack_linear": pack_linear, "pack_joined": pack_joined, "pack_quantized": pack_quantized}


@dataclass(frozen=True)
class CollectiveSample:
    """A communication of `bytes` over `ranks` devices; `bytes` as in `network.collective_seconds`.

    A `recorded` one is run by a list of native calls (`kernels.recording`). `level` is `HOST` for ranks of one of
    several hosts, `NETWORK` for those of several; "" if there is one host.
    """

    collective: str
    ranks: int
    bytes: int
    recorded: bool = False
    level: str = ""

    @property
    def line(self) -> tuple[str, int, bool, str]:
        """Whatever is the same for other sizes."""
        return self.collective, self.ranks, self.recorded, self.level


def time_op(sample: OpSample, device: str, wait: Callable[[], None], limit: float = math.inf) -> list[float]:
    """Return the seconds of one op, run back to back as in a program, several times. Call `wait` before each.

    The timed runs take `limit` seconds together, or one run each. A recorded op without a native kernel has none.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    variants = [[_draw(kind, device, generator) for kind in sample.operands]]
    if sample.heads_last:
        variants = [[x.transpose(1, 2).contiguous().transpose(1, 2) for x in variants[0]]]
    if sample.cold:
        uncached = [i for i, is_uncached in enumerate(sample.uncached[: len(sample.operands)]) if is_uncached]
        copies = int(_COLD_BYTES / max(1, sum(sample.operands[i].bytes for i in uncached)))
        for _ in range(max(1, min(_MAX_COPIES, copies)) - 1):
            variants.append(list(variants[0]))
            for i in uncached:
                variants[-1][i] = variants[0][i].clone()
    if sample.recorded:
        step = _recorded(sample, variants[0])
        if step.failure or step.python_calls:
            return []
        return _time_repeated(partial(_run_steps, step), device, wait, limit)
    run, inputs = _called(sample, variants), cycle(variants)

    def repeat(times: int) -> int:
        for _ in range(times):
            run(*next(inputs))
        return times

    return _time_repeated(repeat, device, wait, limit)


def _time_repeated(repeat: Callable[[int], int], device: str, wait: Callable[[], None], limit: float) -> list[float]:
    """Return the seconds of an op; `repeat` runs it about a number of times, and returns how often it did."""
    import torch

    def seconds(times: int) -> float:
        synchronize(device)
        wait()
        start = time.perf_counter()
        count = repeat(times)
        synchronize(device)
        return (time.perf_counter() - start) / count

    with torch.inference_mode():
        seconds(2)
        once = max(1e-7, seconds(2))
        times = steps_within(limit / _ROUNDS, once, max(2, min(4000, int(_MIN_SECONDS / once))))
        return [seconds(times) for _ in range(_ROUNDS)]


def _called(sample: OpSample, variants: Sequence[list[Any]]) -> Callable[..., object]:
    """Return the function of the operands that runs an op from Python. Weights of `variants` are packed."""
    names = [f"a{i}" for i in range(len(sample.operands))]
    scope = torch_scope() | _PACKING
    op = _op(sample, names)
    if sample.fixed and is_packable(op):
        code = torch_packing(packing_of(op, names[1:]), names[1:])
        for variant in variants:
            variant[1] = eval(code, {**scope, **dict(zip(names, variant, strict=True))})
        code = f"{names[1]}({names[0]})"
    else:
        code = torch_kernel(op, names)
    exec(f"def run({', '.join(names)}):\n    return {code}\n", scope)
    run: Callable[..., object] = scope["run"]
    return run


def _recorded(sample: OpSample, inputs: Sequence[torch.Tensor]) -> Recording:
    """Return a step that runs an op `_CALLS` times, as a program that is recorded does."""
    from distir_relax.kernels.recorded_ops import recorded

    step = Recording()
    tensors = [step.input(x) for x in inputs]
    if sample.heads_last:
        tensors = [step.input(x.transpose(1, 2)).transpose(1, 2) for x in inputs]
    if sample.cached:
        q, k, v = tensors
        _attend_to_cache(step, q, k, v, sample.attrs["scale"])
        return step
    run = _called(sample, [tensors])
    step.keep(run, tensors)
    with recorded(step):
        for _ in range(_CALLS):
            run(*tensors)
    return step


def _attend_to_cache(step: Recording, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    """Record `_CALLS` times the attention of a request's new position to all."""
    from distir_relax.kernels.recorded_ops import recorded

    length = k.shape[2]
    # Each layer of a model has keys and values of its own.
    states = {f"{name}{n}": x.clone() for n in range(_CALLS) for name, x in (("k", k), ("v", v))}
    request = Request(length - 1, 1, 1, States(states))
    new_k, new_v = (x.narrow(2, length - 1, 1).clone() for x in (k, v))
    requests = RecordedRequests(step, [request])
    step.keep(requests, request, q, new_k, new_v)
    with recorded(step):
        attending = RequestsAttention(requests)  # type: ignore[arg-type]
        for n in range(_CALLS):
            attending.attend(q, new_k, new_v, None, scale, ((f"k{n}", 2, (), ()), (f"v{n}", 2, (), ())))


def _run_steps(step: Recording, times: int) -> int:
    count = max(1, times // _CALLS)
    for _ in range(count):
        step.run()
    return count * _CALLS


def _op(sample: OpSample, names: Sequence[str]) -> Op:
    values = tuple(Value(name, kind) for name, kind in zip(names, sample.operands, strict=True))
    results = tuple(Value(f"y{i}", kind) for i, kind in enumerate(sample.results))
    return Op(sample.op, values, results, sample.attrs)


def time_ops(samples: Sequence[OpSample], device: str, world: World, limit: float = math.inf) -> list[list[float]]:
    """Return the seconds of each op, measured several times, on this rank. Collective: all ranks call this together.

    `limit` is the maximum time of an op in seconds.
    """
    return [time_op(sample, device, lambda: _barrier(world), limit) for sample in samples]


def time_reads(cache: float, wait: Callable[[], object]) -> list[tuple[float, list[float]]]:
    """Return the seconds of a CPU to read a byte of packed weights, all of them in turn, several times for each of
    several totals of bytes: from small ones to three times a `cache`. Call `wait` before each."""
    import torch

    weight = torch.ones(_READ_SIDE, _READ_SIDE, dtype=torch.float32)
    size = float(weight.numel() * weight.element_size())
    shares = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0, 3.0)
    counts = sorted({max(1, round(share * min(cache, _MOST_CACHE) / size)) for share in shares})
    packed = [pack_linear(weight, rows=1) for _ in range(counts[-1])]
    x = torch.ones(1, _READ_SIDE, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        for count in counts:
            wait()
            seconds = []
            for _ in range(_READ_ROUNDS):
                start = time.perf_counter()
                for one in packed[:count]:
                    one(x)
                seconds.append((time.perf_counter() - start) / (count * size))
            # The first two bring the weights into the cache.
            found.append((count * size, seconds[2:]))
    return found


def time_ranks(world: World, device: str) -> list[list[float]]:
    """Return the seconds of equal work on each rank, several times, all ranks at once. All ranks call this together."""
    seconds = []
    for _ in range(_RANK_ROUNDS + 1):
        _barrier(world)
        seconds.append(time_rank_work(device))
    # The first is a warm-up.
    return world.exchange(seconds[1:])


def time_rank_work(device: str) -> float:
    """Return the seconds of some 50 milliseconds of products and sums on this rank: a processor may start faster."""
    import torch

    x = torch.full((_RANK_SIDE, _RANK_SIDE), 1.0 / _RANK_SIDE, device=device, dtype=torch.float32)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(_RANK_REPEATS):
        x = torch.tanh(x @ x + x)
    synchronize(device)
    return time.perf_counter() - start


def time_collectives(
    world: World, device: str, scale: int, limit: float = math.inf, parts: bool = True
) -> list[tuple[CollectiveSample, list[float]]]:
    """Time all collectives over all ranks of a launch, with `parts` over parts of it too, several times each.

    Collective: all ranks call this together, with the same `limit`, the seconds for one of them.
    """
    results: list[tuple[CollectiveSample, list[float]]] = []
    for count, inner, level in groups_of(world.host_of, parts):
        shape = (world.size // (count * inner), count, inner)
        comm = world.communicator(DeviceMesh(shape, ("apart", "together", "inner")), device)
        # Messages within and between hosts are measured once.
        pair = None if level in {kind.level for kind, _ in results} else _pair(world.host_of, level)
        if device == "cpu":
            comm.share_memory()
        for elements in payloads(scale):
            for kind in _collectives(comm, elements, device, pair):
                seconds = [t / kind.messages for t in _time_together(world, kind.run, device, limit, kind.takes_part)]
                results.append((CollectiveSample(kind.name, kind.ranks, kind.bytes, level=level), seconds))
            if device != "cpu" or 4 * elements > _MOST_RECORDED:
                continue
            step = _recorded_all_reduces(comm, elements)
            if not step.python_calls:
                seconds = [t / _CALLS for t in _time_together(world, step.run, device, limit)]
                results.append((CollectiveSample("all_reduce", count, 4 * elements, True, level), seconds))
    return results


def groups_of(host_of: Sequence[int], parts: bool = True) -> list[tuple[int, int, str]]:
    """Return the groups of ranks that are measured, in a mesh of (the rest, `count`, `inner`): count, inner, level.

    `host_of` has the first rank of each rank's host. Without `parts`, all ranks are one group.
    """
    size, hosts = len(host_of), len(set(host_of))
    each = size // hosts
    if hosts == 1:
        return [(n, 1, "") for n in range(2 if parts else size, size + 1) if size % n == 0]
    if any(host_of.count(first) != each for first in set(host_of)) or list(host_of) != sorted(host_of):
        return [(size, 1, NETWORK)]
    within = [(n, 1, HOST) for n in range(2, each + 1) if each % n == 0]
    between = [(n, each, NETWORK) for n in range(2, hosts + 1) if hosts % n == 0]
    return [*within, *between, *([(size, 1, NETWORK)] if each > 1 else [])]


def _pair(host_of: Sequence[int], level: str) -> tuple[int, int] | None:
    """Return the two ranks between which messages of a level are measured, None if there is one host."""
    if not level:
        return None
    return 0, next(rank for rank in range(1, len(host_of)) if (host_of[rank] == host_of[0]) == (level == HOST))


def _recorded_all_reduces(comm: Communicator, elements: int) -> Recording:
    """Return a step of `_CALLS` all-reduces in turn: few of them wait for ranks that begin the step later."""
    import torch

    from distir_relax.kernels.recorded_ops import recorded

    step = Recording()
    communicator = RecordedCommunicator(comm, step)
    x = step.input(torch.zeros(elements, dtype=torch.float32))
    with recorded(step):
        for number in range(_CALLS):
            x = communicator.all_reduce(x, "together", "sum", number)
    return step


def time_steps(world: World, session: Session, steps: int, limit: float = math.inf) -> list[float]:
    """Return the seconds of steps on random inputs, each as on the slowest rank. All ranks call this together.

    Runs `steps` steps, or as many as fit in `limit` seconds, at least one.
    """
    inputs = random_inputs(session.bundle.manifest)
    seconds: list[float] = []

    def run(times: int) -> None:
        for _ in range(times):
            # Gathering outputs on rank 0 is not timed, and would delay it against the others.
            session(inputs, outputs=())
            seconds.append(session.seconds)

    run(WARM_UP)
    run(steps_within(limit, max(world.exchange(seconds[-1])), steps))
    return [max(column) for column in zip(*world.exchange(seconds), strict=True)][WARM_UP:]


def steps_within(limit: float, seconds: float, most: int) -> int:
    """Return the number of steps of `seconds` seconds within a limit: at most `most`, at least one."""
    return most if seconds * most <= limit else max(1, int(limit / seconds))


def random_inputs(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return random inputs: small integers that are valid indices; for a training step its learning rate and seed."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for tensor in manifest.inputs:
        dtype = getattr(torch, tensor.dtype)
        if dtype.is_floating_point:
            inputs[tensor.name] = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(dtype)
        else:
            inputs[tensor.name] = torch.randint(0, 2, tensor.shape, generator=generator).to(dtype)
    return inputs if manifest.training is None else {**inputs, **numbers(manifest, 0)}


@dataclass(frozen=True)
class _Timed:
    """A communication over `ranks` that is timed: a run has a number of messages one after the other."""

    name: str
    ranks: int
    bytes: int
    run: Callable[[], object]
    messages: int = 1
    takes_part: bool = True


def _collectives(comm: Communicator, elements: int, device: str, pair: tuple[int, int] | None) -> Iterator[_Timed]:
    """Iterate over the collectives along `together`, and messages between a `pair` of ranks, or all groups of two."""
    import torch

    count = comm.mesh.shape[1]
    sizes = [elements // count + (i < elements % count) for i in range(count)]
    index = comm.index("together")
    x = torch.ones(elements, dtype=torch.float32, device=device)
    local = x[: sizes[index]].contiguous()
    yield _Timed("all_reduce", count, 4 * elements, lambda: comm.all_reduce(x, "together", "sum"))
    yield _Timed("all_gather", count, 4 * elements, lambda: comm.all_gather(local, "together", 0, sizes))
    yield _Timed("reduce_scatter", count, 4 * elements, lambda: comm.reduce_scatter(x, "together", 0, sizes, "sum"))
    square = x[: elements - elements % count].view(count, -1)
    columns = square.shape[1]
    split = [columns // count + (i < columns % count) for i in range(count)]
    # A profile has no times of nothing.
    if square.numel():
        all_to_all = partial(comm.all_to_all, square, "together", 1, split, 0, [count] * count)
        yield _Timed("all_to_all", count, square.numel() * 4, all_to_all)
    first, second = pair or (comm.rank & ~1, comm.rank | 1)
    if count == 2 or pair:

        def round_trip() -> None:
            if comm.rank == first:
                comm.send(x, second)
                comm.recv((elements,), "float32", second)
            elif comm.rank == second:
                comm.recv((elements,), "float32", first)
                comm.send(x, first)

        yield _Timed("send", 2, 4 * elements, round_trip, 2, comm.rank in (first, second))


def _time_together(
    world: World, run: Callable[[], object], device: str, limit: float, takes_part: bool = True
) -> list[float]:
    """Time a communication under the conditions of a program: after work of different length on each rank, which
    replaces the caches' contents. Each time is the mean over ranks that take part, one of which waits for the other.
    """
    import torch

    scratch = torch.ones(_BETWEEN, device=device, dtype=torch.float32)

    def repeat(times: int) -> list[float]:
        _barrier(world)
        seconds = []
        for _ in range(times):
            scratch.add_(1.0)
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return seconds

    repeat(3)
    few = repeat(5)
    once = max(1e-7, *world.exchange(mean(few) if takes_part else 0.0))
    times = steps_within(limit, once, max(8, min(200, int(4 * _MIN_SECONDS / once))))
    many = repeat(times)
    return [mean(column) for column in zip(*filter(None, world.exchange(many if takes_part else [])), strict=True)]


def _barrier(world: World) -> None:
    world.exchange(0)


def synchronize(device: str) -> None:
    """Wait until a device has finished its work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _draw(kind: Any, device: str, generator: torch.Generator) -> torch.Tensor:
    import torch

    dtype = getattr(torch, kind.dtype)
    if dtype == torch.bool and len(kind.shape) > 1:
        # The mask of a language model.
        return torch.ones(kind.shape, dtype=dtype, device=device).tril()
    # Roots and logarithms of negative numbers may take a slow path.
    return torch.randn(kind.shape, generator=generator, device=device, dtype=torch.float32).abs().to(dtype)
