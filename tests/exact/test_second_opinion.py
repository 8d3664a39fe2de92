"""A second opinion on plans, by z3: the ranks' programs of small functions give the model's results for all numbers."""

from __future__ import annotations

import pytest

from distir_relax.ir import parse, print_module
from tests.exact.opinions import cases, is_accepted, opinion
from tests.exact.small_functions import FUNCTIONS, plan

UNKNOWN_IDENTITIES = {"log softmax"}
"""Functions of which a mistake changes nothing, but z3 is not told why: the logarithms of a softmax are its own."""


@pytest.mark.drawn(7)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_plans_are_right(name: str) -> None:
    """Both opinions are that the plan is right: that of the checker, by which it was compiled, and z3's."""
    assert plan(name).proof is not None
    assert opinion(name).symbolic.unchecked == []
    assert opinion(name).is_right("ranked", plan(name).modules["ranked"])


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_wrong_program_is_accepted(name: str) -> None:
    """One mistake at each stage; `make proof` makes more. Programs that are right, but others, may be refused."""
    for case in cases(name, 1):
        assert case.is_right or not case.is_accepted, print_module(case.module)
        assert case.is_right == case.is_near or name in UNKNOWN_IDENTITIES, print_module(case.module)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("linear, rows", 'op="sum"', 'op="max"'),
        ("mean", "value=0.2", "value=0.25"),
        ("embedding", "value=0.0", "value=1.0"),
        ("training, uneven data", "value=0.125", "value=0.25"),
    ],
)
def test_both_find_a_mistake(name: str, old: str, new: str) -> None:
    text = print_module(plan(name).modules["ranked"])
    assert old in text
    module = parse(text.replace(old, new))
    assert not opinion(name).is_right("ranked", module)
    assert not is_accepted(plan(name), "ranked", module)
