"""The program of a launched test: sums of few and of many elements, in turns, each rank with a delay of its own.

``python shared_sums_main.py [RANK]``: that rank has no native kernels, so MPI sums.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from distir_relax.layout import DeviceMesh
from distir_relax.runtime.join import join_world

COUNTS = (1, 5, 127, 8192, 8193, 3, 0, 300_007, 576, 4096, 4097, 262_145, 16, 16, 16)


def drawn(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(COUNTS[number], generator=torch.Generator().manual_seed(1000 * number + rank)).to(dtype)
    if len(x) > 100:
        x[rank], x[50] = torch.inf, torch.nan
    return x


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
    sys.stdout.write(f"rank {world.rank} right\n")
    sys.stdout.flush()
    world.exit()


if __name__ == "__main__":
    main()
