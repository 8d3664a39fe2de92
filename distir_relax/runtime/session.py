"""A bundle loaded once and called many times: by threads of this process, or as one rank of a launch."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError
from distir_relax.runtime.backends import RankProgram, load_program
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.inputs import check_inputs, local_inputs
from distir_relax.runtime.outputs import collect_output
from distir_relax.runtime.progress import Progress, Traffic
from distir_relax.runtime.transports.threads import RankReleased, ThreadWorld, wait_for
from distir_relax.runtime.verification import verify_programs
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT, Watchdog
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


class Session:
    """All ranks of `bundle` as threads of this process; weights are loaded when it is made.

    `session(inputs)` maps names of inputs to global arrays, and gives names of outputs to global torch tensors
    on the CPU. If a rank raises, the others are released and the first error is raised again here.
    Raises RunError when a rank waits longer than `timeout` seconds (0: never) for others.
    """

    def __init__(
        self, bundle: Bundle, backend: str = "torch", device: str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        # What was read from files may be what somebody changed.
        if bundle.path is not None:
            verify_programs(bundle)
        self.bundle = bundle
        self._timeout = timeout
        self._world = ThreadWorld(bundle.manifest.mesh)
        ranks = range(bundle.manifest.mesh.size)
        self.communicators = [self._world.communicator(rank, rank_device(device, rank)) for rank in ranks]
        self._programs = [load_program(backend, bundle, comm.rank, comm, comm.device) for comm in self.communicators]
        self._stuck = False
        self.seconds = 0.0

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Run once. `seconds` is then how long the slowest rank's program took, without slicing and assembling."""
        if self._stuck:
            raise RunError("a rank of this session never came back", hint="make a new session")
        check_inputs(self.bundle.manifest, inputs)
        import torch

        outputs: dict[str, torch.Tensor] = {}
        seconds = [0.0] * len(self.communicators)
        self._world.reset()

        def work(rank: int, threads: int) -> None:
            comm = self.communicators[rank]
            try:
                torch.set_num_threads(threads)
                comm.progress, comm.traffic = Progress(), Traffic()
                local = local_inputs(self.bundle.manifest, inputs, rank, comm.device)
                seconds[rank], found = _run(self.bundle, comm, self._programs[rank], local)
                outputs.update(found)
            except RankReleased:
                pass
            except BaseException as error:
                self._world.abort(error)

        before = torch.get_num_threads()
        share = max(1, before // len(self.communicators))
        threads = [
            threading.Thread(target=work, args=(comm.rank, share), name=f"rank-{comm.rank}", daemon=True)
            for comm in self.communicators
        ]
        watched = [(comm, program.steps) for comm, program in zip(self.communicators, self._programs, strict=True)]
        with Watchdog(watched, self._timeout, lambda lines: self._world.abort(_stall(self._timeout, lines))):
            for thread in threads:
                thread.start()
            self._stuck = not wait_for(threads, self._world, grace=5.0)
        torch.set_num_threads(before)
        if self._world.error is not None:
            raise self._world.error
        self.seconds = max(seconds)
        return outputs


class RankSession:
    """One rank of a launch: its program loaded, its weights in place. Every rank of `world` makes one and calls it."""

    def __init__(
        self, world: World, bundle: Bundle, backend: str = "torch", device: str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        self.bundle = bundle
        self._world = world
        self._timeout = timeout
        self.communicator = world.communicator(bundle.manifest.mesh, rank_device(device, world.local_rank))
        self.communicator.local_size = world.local_size
        self._program: RankProgram | None = None
        self._backend = backend
        self.seconds = 0.0

    def load(self) -> None:
        """Load the program and this rank's slices of the weights. Raises BundleError or RunError on this rank alone."""
        comm = self.communicator
        # One rank of a node looks at the programs of all.
        if self.bundle.path is not None and self._world.local_rank == 0:
            verify_programs(self.bundle)
        self._program = load_program(self._backend, self.bundle, comm.rank, comm, comm.device)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Run once on global arrays: the global outputs on rank 0, nothing on the others.

        When a rank waits longer than the time-out, every rank prints where it is and the launch ends with code 2.
        """
        if self._program is None:
            self.load()
        assert self._program is not None
        comm = self.communicator
        comm.progress, comm.traffic = Progress(), Traffic()
        local = local_inputs(self.bundle.manifest, inputs, comm.rank, comm.device)
        watchdog = Watchdog(
            [(comm, self._program.steps)], self._timeout, self._end, self._world.announce_stall,
            self._world.stall_announced,
        )  # fmt: skip
        with watchdog:
            self._wait_at("the start of the run")
            comm.progress.last = None
            self.seconds, outputs = _run(self.bundle, comm, self._program, local)
            # A rank that left early could not say, in a stall of the others, that it has finished.
            self._wait_at("the end of the run")
        return outputs

    def _wait_at(self, place: str) -> None:
        self.communicator.progress.enter(place, "barrier")
        self.communicator._barrier()
        self.communicator.progress.leave()

    def _end(self, lines: list[str]) -> None:
        if self.communicator.rank == 0:
            lines = [f"error: {_stall(self._timeout, [])}", *lines]
        # One write, so that the lines of different ranks do not mix.
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
        # The other ranks look twice a second, and need the time to print theirs.
        time.sleep(1.5)
        self._world.abort(2)


def rank_device(device: str, local_rank: int) -> str:
    """The device of a rank: "cuda" becomes "cuda:<n>", ranks of a node going round its GPUs.

    Raises RunError for an unknown device, or when there is no GPU.
    """
    if device == "cpu":
        return device
    import torch

    if not device.startswith("cuda"):
        raise RunError(f"unknown device {device!r}", hint="devices: cpu, cuda")
    if not torch.cuda.is_available():
        raise RunError("no CUDA device is usable here", hint="run with --device cpu")
    return f"cuda:{local_rank % torch.cuda.device_count()}" if device == "cuda" else device


def limit_threads(local_size: int) -> None:
    """Give this rank its share of the node's cores, unless OMP_NUM_THREADS says otherwise.

    Two busy thread pools on the same cores are many times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def keep_memory() -> None:
    """Let this process keep the memory that tensors free, where the C library is glibc.

    By default large blocks go back to the system and come again page by page, which costs a step with many of them more
    than a third of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 2**31 - 1)


def _run(
    bundle: Bundle, comm: Communicator, program: RankProgram, local: list[torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    start = time.perf_counter()
    results = program(*local)
    if comm.device != "cpu":
        import torch

        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected = [tensor for tensor in bundle.manifest.outputs if tensor.is_on(comm.rank)]
    if len(results) != len(expected):
        raise RunError(
            f"the program of rank {comm.rank} gives {len(results)} outputs, the bundle names {len(expected)}"
        )
    outputs = {}
    found = {tensor.name: result for tensor, result in zip(expected, results, strict=True)}
    for tensor in bundle.manifest.outputs:
        whole = collect_output(comm, tensor, found.get(tensor.name))
        if whole is not None:
            outputs[tensor.name] = whole
    comm.progress.finished = True
    return seconds, outputs


def _stall(timeout: float, lines: list[str]) -> RunError:
    message = "\n  ".join([f"a rank has waited for more than {timeout:g} s", *lines])
    return RunError(message, hint="the programs may be deadlocked; --timeout gives slow steps more time")
