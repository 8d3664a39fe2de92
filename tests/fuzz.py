"""Many random programs, and as many windows: ``python -m tests.fuzz COUNT [FIRST_SEED]``.

Prints the seed of each that fails; exits 1 then.
"""

from __future__ import annotations

import sys
import traceback

import torch

from tests.test_random_programs import MESHES, check_program
from tests.windows import check_case


def main(count: int, first: int = 10_000) -> int:
    """Run `count` programs and `count` windows, round the meshes and both ways of treating tails."""
    torch.set_num_threads(1)
    cases = [(mesh, tail) for mesh in MESHES for tail in ("ragged", "pad")]
    failed = 0
    for number in range(count):
        mesh, tail = cases[number % len(cases)]
        try:
            check_program(first + number, MESHES[mesh], tail)
        except Exception:
            failed += 1
            print(f"seed {first + number}, mesh {mesh}, tail {tail}:\n{traceback.format_exc(limit=-3)}")
        try:
            check_case(first + number, tail)
        except Exception:
            failed += 1
            print(f"window {first + number}, tail {tail}:\n{traceback.format_exc(limit=-3)}")
    print(f"{2 * count - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
