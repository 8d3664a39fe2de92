"""Errors name the op that is wrong, or the first one that uses its value; ``make proof`` counts many more."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from distir_relax.ir import Module
from tests.proof.mistakes import errors
from tests.proof.naming import EXACT, NEAR, OTHER, naming
from tests.proof.test_model import plan

Mistake = tuple[str, str, str, Module, str]
"""The plan, the stage, the kind, the program, and the error, which is empty if none is found."""

PLANS = ["dropout", "halos", "all", "training, ZeRO", "training, pipeline"]


@pytest.fixture(scope="module")
def drawn() -> list[Mistake]:
    """Mistakes in plans, with the error for each."""
    return [(name, *item) for name in PLANS for item in errors(name, 6, seed=4)]


def test_errors_name_the_op(drawn: list[Mistake]) -> None:
    refused = [(kind, plan(name).modules[stage], module, error) for name, stage, kind, module, error in drawn if error]
    found = Counter(naming(*item) for _, *item in refused)
    assert found.total() >= 75
    assert found[EXACT] + found[NEAR] >= 0.95 * found.total(), found
    # An op that is left out is in no program: its user is named.
    there = Counter(naming(*item) for kind, *item in refused if kind != "drop")
    assert there[EXACT] >= 0.85 * there.total(), there


def test_other_errors_do_not(drawn: list[Mistake]) -> None:
    """The error for another mistake in the same program does not name the op."""
    found: Counter[str] = Counter()
    for (name, stage, _, module, error), (other, its_stage, _, _, its_error) in pairwise(drawn):
        if error and its_error and (name, stage) == (other, its_stage):
            found[naming(plan(name).modules[stage], module, its_error)] += 1
    assert found[OTHER] >= 0.8 * found.total(), found
