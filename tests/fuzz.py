"""Many random programs: ``python -m tests.fuzz COUNT [FIRST_SEED]``. Prints the seed of each that fails; exits 1 then."""

from __future__ import annotations

import sys
import traceback

import torch

from tests.test_random_programs import MESHES, check_program


def main(count: int, first: int = 10_000) -> int:
    """Run `count` programs, round the meshes and both ways of treating tails."""
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
    print(f"{count - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
