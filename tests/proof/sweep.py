"""Schedules of many random programs, all of which must be proved, and mistakes in them, which must be found:
``python -m tests.proof.sweep COUNT [SEED]``.

A schedule of a random program that is called wrong is shrunk and printed. So is one with a mistake that is not found
though it changes an output. Of mistakes in whole plans, those that are not found are named: a few change nothing. Exits
1 for any of the former, or if less than 99 of 100 of the latter are found.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter

import torch
from hypothesis import given, seed, settings

from distir_relax.ir import print_module
from distir_relax.proof import check_schedule
from tests.compiled import check_results, compiled
from tests.programs import Program
from tests.proof.rank_mutants import mutants
from tests.proof.test_projection import PLANS, plan
from tests.proof.test_schedule import problem
from tests.test_random_programs import MESHES, SETTINGS, TAILS, drawn_anew, programs

MUTANTS = 58
"""The number of mistakes in each plan."""


def main(count: int, first: int = 1) -> int:
    """Check the schedules of `count` programs, over all meshes and both ways of treating tails, and the mistakes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [(mesh, tail) for mesh in MESHES for tail in TAILS]
    alarms = 0
    for mesh, tail in cases:
        try:
            _run_programs(count // len(cases), first, mesh, tail)
        except Exception:
            alarms += 1
            print(f"seed {first}, mesh {mesh}, tail {tail}:\n{traceback.format_exc(limit=-3)}", flush=True)
    found: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name in PLANS:
        modules = plan(name).modules
        for kind, module in mutants(modules["distributed"], MUTANTS, seed=first):
            # Another order of communications that do not depend on each other is no mistake of a schedule.
            if kind != "reorder":
                (found if problem(modules["sharded"], module) else missed)[f"{name}: {kind}"] += 1
    print(f"{count // len(cases) * len(cases)} programs: wrong for {alarms} of {len(cases)} meshes and tails")
    print(f"{found.total() + missed.total()} mistakes: {found.total()} found, not found {dict(missed)}")
    return 1 if alarms or missed.total() > found.total() / 99 else 0


def _run_programs(count: int, first: int, mesh: str, tail: str) -> None:
    @seed(first)
    @settings(SETTINGS, max_examples=count)
    @given(programs(MESHES[mesh]))
    def run(program: Program) -> None:
        with drawn_anew():
            stages = compiled(program.module, tail, observers=())
        sharded, schedule = stages["sharded"], stages["distributed"]
        check_schedule(sharded, schedule)
        for kind, module in mutants(schedule, 1, seed=len(print_module(schedule))):
            if kind != "reorder" and problem(sharded, module) == "":
                check_results({**stages, "distributed": module}, program.tensors, f"{kind}:")

    run()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
