"""Two opinions on plans with one mistake: the checker's, and z3's on the ranks' programs.

    python -m tests.exact.opinions COUNT [SEED]    COUNT mistakes in each program of each function, at each stage

A mistake is made in the ranks' programs, in the schedule, which is then projected to ranks, or in the sharded
program, which is then run as it is. Printed are those of which the opinions differ. Where z3 finds other results
because it knows too little of a function, floats do not: with random floats a wrong program gives other results.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch

import distir_relax as dr
from distir_relax.errors import DistIRError
from distir_relax.ir import Module, inline, verify
from distir_relax.lowering import Project
from distir_relax.ops import check
from distir_relax.proof import check_model, check_projection, check_schedule
from tests.exact.exact_tensors import Exact
from tests.exact.plan_claims import Claims, numbers_of
from tests.exact.rank_executor import Stuck, run_function
from tests.exact.small_functions import FUNCTIONS, plan
from tests.exact.z3_terms import Terms, differ
from tests.proof.rank_mutants import mutants

STAGES = ("ranked", "distributed", "sharded")


class Opinion:
    """The opinion of z3 and of floats on programs of one function. Terms of z3 are made once for all of them."""

    def __init__(self, name: str) -> None:
        self.terms = Terms()
        self.plan = plan(name)
        self.is_trained = FUNCTIONS[name].trained
        self.symbolic = Claims(FUNCTIONS[name], self.plan, self._variables)
        generator = torch.Generator().manual_seed(3)
        self.floats = Claims(
            FUNCTIONS[name], self.plan, lambda _, x: torch.randn(x.shape, generator=generator, dtype=x.dtype)
        )

    def _variables(self, name: str, like: torch.Tensor) -> torch.Tensor:
        places = itertools.product(*map(range, like.shape))
        ids = [self.terms.variable(f"{name}{list(place)}") for place in places]
        return Exact(torch.tensor(ids, dtype=torch.int64).reshape(like.shape), self.terms, like.dtype)

    def is_right(self, stage: str, module: Module) -> bool:
        """Return whether z3 proves that a program gives the model's results.

        Formulas of wrong training steps do not cancel, and are large: those that differ for random floats are wrong.
        """
        if self.is_trained and not self.is_near(stage, module):
            return False
        try:
            pairs = numbers_of(self.terms, _pairs(self.symbolic, stage, module))
        except FAILURES:
            return False
        return not differ(self.terms, pairs)

    def is_near(self, stage: str, module: Module) -> bool:
        """Return whether a program gives nearly the model's results for random floats."""
        try:
            return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in _pairs(self.floats, stage, module))
        except FAILURES:
            return False


FAILURES = (Stuck, DistIRError, ValueError, RuntimeError, IndexError, TypeError, AssertionError)
"""Errors of programs that cannot be run."""


def _pairs(claims: Claims, stage: str, module: Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if stage == "ranked":
        return claims.pairs(module)
    if stage == "distributed":
        return claims.pairs(Project().run(inline(module)))
    with torch.no_grad():
        found = run_function(inline(module).main, claims.whole)
    return [(found[name], x) for name, x in claims.expected.items()]


def is_accepted(made: dr.Plan, stage: str, module: Module) -> bool:
    """Return whether the checker accepts another program of a plan at a stage."""
    modules = made.modules
    try:
        verify(module, check)
        if stage == "ranked":
            check_projection(modules["distributed"], module)
        elif stage == "distributed":
            check_schedule(modules["sharded"], module)
        else:
            check_model(made.imported.module, module)
    except DistIRError:
        return False
    return True


@cache
def opinion(name: str) -> Opinion:
    """Return the opinion on a function."""
    return Opinion(name)


@dataclass(frozen=True)
class Case:
    """A mistake in a program of a function, and the opinions on it."""

    name: str
    stage: str
    kind: str
    module: Module
    is_accepted: bool
    is_right: bool
    is_near: bool


def cases(name: str, count: int, seed: int = 1) -> Iterator[Case]:
    """Make `count` mistakes in the program of each stage of a function."""
    made, asked = plan(name), opinion(name)
    for stage in STAGES:
        # A seed for each, or the same kinds of mistakes would be made in all.
        for kind, module in mutants(made.modules[stage], count, seed + crc32(f"{name} {stage}".encode())):
            opinions = is_accepted(made, stage, module), asked.is_right(stage, module), asked.is_near(stage, module)
            yield Case(name, stage, kind, module, *opinions)


def main(count: int, seed: int = 1) -> int:
    """Compare the opinions on all functions; the exit code says whether a wrong program was accepted."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    for name in FUNCTIONS:
        assert opinion(name).is_right("ranked", plan(name).modules["ranked"]), name
        for case in cases(name, count, seed):
            verdict = f"{'accepted' if case.is_accepted else 'refused'}, {'right' if case.is_right else 'wrong'}"
            totals[verdict] += 1
            totals["z3 and floats differ"] += case.is_right != case.is_near
            if case.is_accepted != case.is_right or case.is_right != case.is_near:
                print(f"{name}, {case.stage}, {case.kind}: {verdict}, floats near: {case.is_near}", flush=True)
    print(f"{len(FUNCTIONS)} functions, {dict(totals)}")
    return int(totals["accepted, wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
