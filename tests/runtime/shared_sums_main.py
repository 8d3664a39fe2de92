"""The program of a launched test: sums of few and of many elements, in turns, each rank with a delay of its own.

``python shared_sums_main.py [RANK]``: that rank has no native kernels, so MPI sums.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

from distir_relax.kernels.recorded_ops import recorded
from distir_relax.kernels.recording import Recording
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.join import join_world
from distir_relax.runtime.progress import Point
from distir_relax.runtime.recorded_communicator import RecordedCommunicator

COUNTS = (1, 5, 127, 8192, 8193, 3, 0, 300_007, 576, 4096, 4097, 262_145, 16, 16, 16)


def drawn(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(COUNTS[number], generator=torch.Generator().manual_seed(1000 * number + rank)).to(dtype)
    if len(x) > 100:
        x[rank], x[50] = torch.inf, torch.nan
    return x


def check_recorded(comm: Communicator) -> None:
    """Sums of a recorded step, between others, and what the watchdog reads meanwhile: rank 0 comes late to step 9."""
    numbers = [n for n, count in enumerate(COUNTS) if count]
    step = Recording()
    given = [step.input(drawn(comm.rank, n, torch.float32)) for n in numbers]
    of_step = RecordedCommunicator(comm, step)
    with recorded(step):
        results = [of_step.all_reduce(x, "tp", "sum", 9 + i) for i, x in enumerate(given)]
        # A function that is called again.
        again = of_step.all_reduce(given[0], "tp", "sum", 9)
    seen = []

    def look() -> None:
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            waiting, current = comm.progress.waiting(), comm.progress.current
            seen.extend([current] if waiting > 0.2 else [])
            time.sleep(0.01)

    for run in range(3):
        comm.start_counting()
        assert (comm.progress.waited, comm.progress.last) == (0, None)
        if run == 1 and comm.rank:
            watcher = threading.Thread(target=look)
            watcher.start()
        elif run == 1:
            time.sleep(0.5)
        step.run()
        for number, result in zip(numbers, results, strict=True):
            parts = [drawn(rank, number, torch.float32) for rank in range(comm.world_size)]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(again, results[0], rtol=0, atol=0)
        assert comm.progress.last == Point(9, "all_reduce", 1)
        assert comm.progress.current is None
        assert comm.traffic.calls == {"all_reduce": len(numbers) + 1}
        sent = 4 * (sum(COUNTS) + COUNTS[0]) * 2 * (comm.world_size - 1) / comm.world_size
        assert abs(comm.traffic.total_bytes - sent) < len(numbers)
        if run == 1 and comm.rank:
            watcher.join()
            assert seen == [Point(9, "all_reduce")], seen
            assert 0.3 < comm.progress.waited < 20, comm.progress.waited
        comm.all_reduce(torch.ones(5), "tp", "sum", 99)
        assert comm.progress.last == Point(99, "all_reduce")


def main() -> None:
    world = join_world()
    assert world is not None, "not started by a launcher"
    is_native = len(sys.argv) == 1
    if not is_native and int(sys.argv[1]) == world.rank:
        os.environ["DISTIR_NATIVE"] = "0"
    comm = world.communicator(DeviceMesh((world.size,), ("tp",)))
    torch.set_num_threads(1)
    for turn in range(3):
        for number in range(len(COUNTS)):
            if (turn + number) % world.size == world.rank:
                time.sleep(0.003)
            for dtype in (torch.float32, torch.bfloat16):
                parts = [drawn(rank, number, dtype) for rank in range(world.size)]
                expected = parts[0].float()
                for part in parts[1:]:
                    expected = expected + part.float()
                x = parts[world.rank]
                out = x if turn == 2 else torch.empty_like(x) if turn else None
                found = comm.all_reduce(x, "tp", "sum", out=out)
                if is_native or world.size == 2:
                    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    sums = [found is not None for found in comm._shared_sums.values()]
    assert sums == [is_native], sums
    if is_native:
        check_recorded(comm)
    sys.stdout.write(f"rank {world.rank} right\n")
    sys.stdout.flush()
    world.exit()


if __name__ == "__main__":
    main()
