"""Errors for mistakes in plans: how many name the wrong op, by kind of mistake: ``python -m tests.proof.mistakes COUNT
[SEED]``.

`COUNT` programs with one mistake are drawn for each stage of each plan. A mistake that is not found is run
(`find_counterexample`): one that changes no result is none. Exits 1 if the errors for less than 95 of 100 name the op
(`tests.proof.naming`), or if a mistake that changes a result is not found.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from distir_relax.counterexample import Stages, find_counterexample
from distir_relax.ir import Module
from distir_relax.proof.plan import MODEL, PROJECTION, SCHEDULE
from tests.proof import test_model, test_projection, test_schedule
from tests.proof.naming import EXACT, NEAR, OTHER, naming
from tests.proof.rank_mutants import mutants
from tests.proof.test_model import plan

STATEMENTS = {"sharded": MODEL, "distributed": SCHEDULE, "ranked": PROJECTION}


def errors(name: str, count: int, seed: int) -> Iterator[tuple[str, str, Module, str]]:
    """Iterate over mistakes in a plan: stage, kind, program, and the error, which is empty if none is found."""
    made = plan(name)
    sharded = made.modules["sharded"]
    for stage in STATEMENTS:
        for kind, module in mutants(made.modules[stage], count, seed):
            if stage == "sharded":
                yield stage, kind, module, test_model.problem(made, module)
            elif stage == "ranked":
                yield stage, kind, module, test_projection.problem(made, module)
            elif kind != "reorder":
                # Another order of communications that do not depend on each other is no mistake of a schedule.
                yield stage, kind, module, test_schedule.problem(sharded, module)


def changes_a_result(name: str, stage: str, module: Module) -> bool:
    """Whether an input is found on which a program gives another result."""
    made = plan(name)
    modules = {**made.modules, stage: module}
    stages = Stages(modules["ranked"], modules["distributed"], modules["sharded"], made.imported.module)
    return find_counterexample(stages, STATEMENTS[stage], 20.0).difference is not None


def main(count: int, seed: int = 1) -> int:
    """Print the table of all plans."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: Counter[tuple[str, str]] = Counter()
    missed = harmless = 0
    for name in dict.fromkeys([*test_model.STEPS, *test_projection.PLANS]):
        for stage, kind, module, error in errors(name, count, seed):
            if error:
                how = naming(plan(name).modules[stage], module, error)
                found[kind, how] += 1
                found[stage, how] += 1
                found["all", how] += 1
                if how == OTHER:
                    print(f"{name}, {stage}, {kind}: {error.splitlines()[0][:300]}")
            elif changes_a_result(name, stage, module):
                missed += 1
                print(f"{name}, {stage}, {kind}: not found, though it changes a result")
            else:
                harmless += 1
    print(table(found))
    print(f"{missed} not found; {harmless} that change no result are not found either")
    named = found["all", EXACT] + found["all", NEAR]
    return 1 if missed or named < 0.95 * (named + found["all", OTHER]) else 0


def table(found: Counter[tuple[str, str]]) -> str:
    """The counts by kind, as text: the op itself named, one that uses its value, another."""
    rows: list[Sequence[object]] = [("", "mistakes", "op named", "or its user", "share")]
    for kind in dict.fromkeys(kind for kind, _ in found):
        exact, near, other = (found[kind, how] for how in (EXACT, NEAR, OTHER))
        rows.append((kind, exact + near + other, exact, near, f"{(exact + near) / (exact + near + other):.1%}"))
    return "\n".join(f"{a!s:20} {b!s:>9} {c!s:>9} {d!s:>11} {e!s:>7}" for a, b, c, d, e in rows)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
