"""Peak memory and time of the compilation of a model folder, and the time in which ranks read their weights.

``python benchmarks/compile_memory.py DIR [RANKS]``
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import distir_relax as dr
from distir_relax.bundle import local_intervals, read_bundle


def main(folder: str, ranks: int = 3) -> None:
    """Compile the folder for some ranks, and print memory and time; then read the weights of each rank."""
    start = time.perf_counter()
    generation = dr.compile_generation(folder, strategy=f"1/{ranks}/1/1", max_length=1024)
    with tempfile.TemporaryDirectory() as temporary:
        path = generation.plan.save(Path(temporary) / "model.dist", backends=("torch",))
        print(f"compiled in {time.perf_counter() - start:.1f} s, peak {_status('VmHWM') / 1e3:.0f} MB")
        bundle = read_bundle(path, verify_weights=False)
        for rank in range(ranks):
            before, start = _bytes_read(), time.perf_counter()
            weights = [
                bundle.weights.read(tensor.name, local_intervals(tensor, bundle.manifest.mesh, rank))
                for tensor in bundle.manifest.weights
            ]
            seconds, size = time.perf_counter() - start, sum(weight.nbytes for weight in weights)
            print(
                f"rank {rank}: {size / 1e6:.0f} MB of weights from {(_bytes_read() - before) / 1e6:.0f} MB of files "
                f"in {seconds:.2f} s"
            )


def _status(name: str) -> int:
    """Return a number of /proc/self/status, in KiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def _bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
