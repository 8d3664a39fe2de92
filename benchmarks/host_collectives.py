"""Collectives of ranks on several hosts (namespaces of this machine): through each host once, and rank by rank.

    python -m benchmarks.host_collectives [--hosts 2 2] [--rate 1gbit] [--seconds 1]

Prints milliseconds of a collective of 4 KB to 4 MB along an axis over all ranks: the slowest rank, the median of 5
measurements that take turns. Needs root (`tests.hosts.laboratory`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

SIZES = [1 << k for k in range(12, 23, 2)]
PORT = "29511"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 2], help="ranks of each host")
    parser.add_argument("--rate", default="1gbit", help="of what a host sends, as tc writes it; empty for no limit")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.seconds)
    elif options.inside:
        compare(options.hosts, options.rate, options.seconds)
    else:
        from tests.hosts.laboratory import UNSHARE

        command = [*UNSHARE, sys.executable, "-m", "benchmarks.host_collectives", "--inside", *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)


def compare(hosts: list[int], rate: str, seconds: float) -> None:
    """Start the ranks, and print the table that rank 0 has measured."""
    from tests.hosts.laboratory import Laboratory

    names = [f"n{number}" for number in range(len(hosts))]
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), names) as laboratory:
        for name in names if rate else ():
            laboratory.rate(name, rate)
        print(f"{names[0]} to {names[1]}: {laboratory.measure(*names[:2])}")
        places = [(name, local, count) for name, count in zip(names, hosts, strict=True) for local in range(count)]
        common = {"MASTER_ADDR": laboratory.address("n0"), "MASTER_PORT": PORT, "WORLD_SIZE": str(len(places))}
        started = [
            laboratory.start(
                name, sys.executable, "-m", "benchmarks.host_collectives", "--rank", "--seconds", str(seconds),
                stdout=subprocess.PIPE,
                env={
                    **os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count),
                },
            )
            for rank, (name, local, count) in enumerate(places)
        ]  # fmt: skip
        texts = [process.communicate(timeout=600)[0] for process in started]
    found = json.loads(texts[0])
    print("| bytes | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for row, size in enumerate(SIZES):
        print(f"| {size} | " + " | ".join(f"{1e3 * times[row]:.2f}" for times in found.values()) + " |")


def measure(seconds: float) -> None:
    """Run on each rank; rank 0 prints the times of all kinds by size."""
    import torch

    from distir_relax.layout import DeviceMesh
    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.transports.torch_distributed import TorchWorld

    torch.set_num_threads(1)
    world = TorchWorld()
    n = world.size
    mesh = DeviceMesh((n,), ("tp",))
    by_hosts = world.communicator(mesh)
    world.host_of = list(range(n))
    flat = world.communicator(mesh)

    def runs(comm: Communicator, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
        sizes = [len(x) // n + (i < len(x) % n) for i in range(n)]
        part = x[: sizes[world.rank]].contiguous()
        return {
            "all_reduce": lambda: comm.all_reduce(x, "tp", "sum"),
            "all_gather": lambda: comm.all_gather(part, "tp", 0, sizes),
            "reduce_scatter": lambda: comm.reduce_scatter(x, "tp", 0, sizes, "sum"),
        }

    found: dict[str, list[float]] = {}
    for size in SIZES:
        times: dict[str, list[float]] = {}
        x = torch.ones(size // 4)
        kinds = {
            f"{kind}, {name}": run
            for name, comm in (("by hosts", by_hosts), ("rank by rank", flat))
            for kind, run in runs(comm, x).items()
        }
        for _ in range(5):
            for name, run in sorted(kinds.items()):
                run()
                world.exchange(0)
                start = time.perf_counter()
                run()
                once = max(world.exchange(time.perf_counter() - start))
                count = max(3, min(500, int(seconds / 30 / once)))
                start = time.perf_counter()
                for _ in range(count):
                    run()
                mine = (time.perf_counter() - start) / count
                times.setdefault(name, []).append(max(world.exchange(mine)))
        for name, values in times.items():
            found.setdefault(name, []).append(median(values))
    if world.rank == 0:
        print(json.dumps(found))
    world.exit()


if __name__ == "__main__":
    main()
