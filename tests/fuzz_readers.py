"""Many mutated files for each reader: ``python -m tests.fuzz_readers COUNT [SEED [READER…]]``.

What fails is printed with its seed: the same seed makes the same file again. Exits 1 then.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.readers import TARGETS

MOST_MEMORY = 1 << 20
"""So many kilobytes may the process grow by, of one file."""


def main(count: int, first: int = 1_000_000, only: tuple[str, ...] = ()) -> int:
    """Read `count` mutated files with each reader, from seed `first` on."""
    torch.set_num_threads(1)
    failed = 0
    for target in TARGETS:
        if only and target.name not in only:
            continue
        start, wrong = time.perf_counter(), 0
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(first, first + count):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                problem = target.try_file(seed, Path(folder))
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
                if grown > MOST_MEMORY:
                    problem = f"{target.name} {seed}: {grown:,} kB were taken. {problem}"
                if problem:
                    wrong += 1
                    print(problem, flush=True)
        print(f"{target.name}: {count:,} files, {time.perf_counter() - start:.0f} s, {wrong} failed", flush=True)
        failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:3]), tuple(sys.argv[3:])))
