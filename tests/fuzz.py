"""Many random programs, as many windows and torch models, and a tenth as many that are trained:
``python -m tests.fuzz COUNT [SEED]``.

The reference executor runs the schedules of `COUNT` programs, the ranks of each backend those of two in five. A program
that fails is shrunk and printed, with the line that runs it again, as a model is with its number; a window is printed
by its number. Exits 1 then.
"""

from __future__ import annotations

import sys
import traceback
from types import ModuleType

import torch
from hypothesis import given, seed, settings

from distir_relax.bundle import BACKENDS
from tests import models, symbolic_models, training_models
from tests.programs import Program
from tests.test_random_programs import MESHES, SETTINGS, TAILS, check_program, programs
from tests.windows import check_case


def main(count: int, first: int = 10_000) -> int:
    """Run programs on the reference executor and the backends, and windows, with both ways of treating tails."""
    torch.set_num_threads(1)
    cases = [(mesh, tail) for mesh in MESHES for tail in TAILS]
    failed = 0
    shares = {"reference": count // len(cases), **dict.fromkeys(BACKENDS, count * 2 // 5 // len(cases))}
    for by, share in shares.items():
        for mesh, tail in cases:
            try:
                _run_programs(share, first, mesh, tail, by)
            except Exception:
                failed += 1
                what = f"programs on {by}, seed {first}, mesh {mesh}, tail {tail}"
                print(f"{what}:\n{traceback.format_exc(limit=-3)}", flush=True)
    for number in range(count):
        tail = TAILS[number % 2]
        try:
            check_case(first + number, tail)
        except Exception:
            failed += 1
            print(f"window {first + number}, tail {tail}:\n{traceback.format_exc(limit=-3)}", flush=True)
    failed += sum(_fails(models, number) for number in range(first, first + count))
    failed += sum(_fails(symbolic_models, number) for number in range(first, first + count))
    failed += sum(_fails(training_models, number) for number in range(first, first + count // 10))
    ran = ", ".join(f"{share * len(cases)} programs on {by}" for by, share in shares.items())
    print(
        f"{ran}, {count} windows, {count} models, as many with symbolic dims, {count // 10} trainings: {failed} failed"
    )
    return 1 if failed else 0


def _fails(drawing: ModuleType, number: int) -> bool:
    """Whether the model that a module draws by a number goes wrong; it is printed then."""
    drawn = drawing.draw(number)
    if not (what := drawing.fails(drawn)):
        return False
    print(f"{drawing.__name__} {number}: {drawing.shrink(drawn)}\n{what}", flush=True)
    return True


def _run_programs(count: int, first: int, mesh: str, tail: str, by: str) -> None:
    @seed(first)
    @settings(SETTINGS, max_examples=count, print_blob=True)
    @given(programs(MESHES[mesh]))
    def run(program: Program) -> None:
        check_program(program, tail, by)

    run()


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
