"""What tasks of a pipeline take, worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.options import CompileOptions
from distir_relax.cost.profile import Profile
from distir_relax.ir import Module
from distir_relax.ops import lookup
from distir_relax.strategies import Strategy
from distir_relax.strategies.apply import ApplyStrategy
from distir_relax.strategies.sample_dims import Samples
from distir_relax.strategies.stage_costs import StageCosts
from tests.machines import link, machine
from tests.mlp import half_squared_error

SAMPLES = 7
WIDTHS = (6, 13, 5)


def marked() -> Module:
    """Two products of 7 samples, and a loss, with the marks of a strategy."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))
        batch = torch.empty(SAMPLES, WIDTHS[0]), torch.empty(SAMPLES, WIDTHS[-1])
        source = dr.Training(model, half_squared_error, dr.optim.SGD(), batch).read(CompileOptions())
    return ApplyStrategy(Strategy(microbatches=3)).run(source.imported.module)


def costs(profile: Profile, microbatches: int, share: Fraction, is_trained: bool) -> list[float]:
    """Those of the two products."""
    module = marked()
    products = [number for number, op in enumerate(module.main.ops) if lookup(op.name).cost.product]
    assert len(products) == 2
    return StageCosts(profile, Samples.of(module), microbatches, share, is_trained).of(products)


@pytest.mark.parametrize(("data", "rows"), [(1, 3), (2, 2), (3, 1)])
def test_a_product_is_one_of_a_microbatch_and_two_more_in_its_backward(data: int, rows: int) -> None:
    work = [2.0 * rows * a * b for a, b in pairwise(WIDTHS)]
    share = Fraction(1, 3 * data)
    assert costs(machine(flops=1.0), 3, share, is_trained=False) == work
    # The input of the first has no gradient.
    assert costs(machine(flops=1.0), 3, share, is_trained=True) == [2 * work[0], 3 * work[1]]


def test_gradients_are_added_up_over_microbatches() -> None:
    slow = machine(bandwidth=1.0)
    one, several = (costs(slow, count, Fraction(1, 3), is_trained=True) for count in (1, 3))
    # A sum reads two and writes one.
    added = [3.0 * 4 * a * b for a, b in pairwise(WIDTHS)]
    assert [b - a for a, b in zip(one, several, strict=True)] == added


def test_what_has_no_samples_is_done_once_for_all_microbatches() -> None:
    module = marked()
    scalars = [
        n for n, op in enumerate(module.main.ops) if all(not v.tensor.shape for v in (*op.operands, *op.results))
    ]
    assert scalars
    one, several = (
        StageCosts(machine(flops=1.0), Samples.of(module), count, Fraction(1, 3), False).of(scalars) for count in (1, 4)
    )
    assert sum(one) > 0
    assert several == [cost / 4 for cost in one]


def test_sending_takes_what_a_microbatch_has() -> None:
    module = marked()
    given = next(op for op in module.main.ops if lookup(op.name).cost.product).results
    stages = StageCosts(machine(levels=link(0.5, 1.0)), Samples.of(module), 3, Fraction(1, 3), True)
    assert stages.send_seconds(given) == 0.5 + 3 * 13 * 4
    assert stages.send_seconds([]) == 0.0
