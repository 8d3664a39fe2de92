"""All-reduces of ranks on one machine: through shared memory (`runtime.transports.shared_sums`) and by Open MPI.

    python benchmarks/collectives.py [--ranks 2 4] [--seconds 0.3]

Prints microseconds of an all-reduce of 1 KB to 16 MB, as a rank's program calls it: the slowest rank, the median of 5
measurements that take turns. MPI reduces bfloat16 as float32, so the same buffer is converted before and after. More
ranks than cores share them, which is slow either way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

SIZES = [1 << k for k in range(10, 25, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.seconds)
    else:
        compare(options.ranks, options.seconds)


def compare(numbers: list[int], seconds: float) -> None:
    """Launch so many ranks; print the table."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    columns = []
    for ranks in numbers:
        command = ["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable, __file__, "--rank"]
        command += ["--seconds", str(seconds)]
        done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        columns += [(f"{ranks} ranks, {name}", times) for name, times in found.items()]
    print("| bytes | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for row, size in enumerate(SIZES):
        print(f"| {size} | " + " | ".join(f"{times[row]:.1f}" for _, times in columns) + " |")


def measure(seconds: float) -> None:
    """Run on each rank; rank 0 prints the times of all kinds by size."""
    import torch
    from mpi4py import MPI

    from distir_relax.layout import DeviceMesh
    from distir_relax.runtime.transports.mpi import MPIWorld

    torch.set_num_threads(1)
    world = MPIWorld()
    mesh = DeviceMesh((world.size,), ("tp",))
    shared, plain = world.communicator(mesh), world.communicator(mesh)
    plain._shared_sums[0] = None
    kinds = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, comm in (("shared memory", shared), ("MPI", plain)):
            comm.checks_steps = False
            kinds[f"{str(dtype).removeprefix('torch.')}, {name}"] = (comm, dtype)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(5):
            for name, (comm, dtype) in kinds.items():
                x = torch.zeros(size // dtype.itemsize, dtype=dtype)
                out = torch.empty_like(x)
                count = 0
                # One call, to know how many to time; all ranks agree.
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                comm.all_reduce(x, "tp", "sum", out=out)
                once = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
                count = max(3, min(2000, int(seconds / 5 / once)))
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                for _ in range(count):
                    comm.all_reduce(x, "tp", "sum", out=out)
                mine = (time.perf_counter() - start) / count
                times[name].append(MPI.COMM_WORLD.allreduce(mine, MPI.MAX) * 1e6)
        for name, values in times.items():
            found[name].append(median(values))
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
