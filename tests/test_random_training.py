"""Random models are trained as torch trains them, under drawn strategies; ``make fuzz`` draws more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from distir_relax.ops import TABLE, lookup
from distir_relax.ops.table import gradient_of
from tests.training_models import KINDS, Drawn, check, draw, fails, shrink

COUNT, CHUNK = 12, 12


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_a_random_model_is_trained_as_torch_trains_it(first: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        drawn = draw(seed)
        try:
            found[check(drawn)] += 1
        except Exception as wrong:
            wrong.add_note(str(shrink(drawn)))
            raise
    # Few are refused.
    assert found["right"] >= CHUNK - 2, found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", range(1000, 1000 + CHUNK, CHUNK // 2))
def test_a_random_model_is_trained_on_batches_of_changing_size(first: int) -> None:
    """One compilation for batches of 7, 3, 1, 12 and 2 rows: fewer than devices, and than microbatches."""
    found: Counter[str] = Counter()
    for seed in range(first, first + CHUNK // 2):
        drawn = draw(seed)
        try:
            found[check(drawn, (7, 3, 1, 12, 2))] += 1
        except Exception as wrong:
            wrong.add_note(str(drawn))
            raise
    assert found["right"] >= CHUNK // 2 - 2, found


def test_many_kinds_of_layers_are_drawn() -> None:
    assert len(KINDS) >= 60
    assert len({layer for seed in range(200) for layer in draw(seed).layers}) > 0.9 * len(KINDS)


def test_a_wrong_gradient_is_found_and_shrunk() -> None:
    layers = ("(5,{w}) (5) F.linear(x, a, b)", "torch.tanh(x)", "(4,{w}) () F.linear(x, a)")
    drawn = Drawn(3, layers, "mse", "adam", "3/1/1/1", 0.1)
    assert check(drawn) == "right"
    with TABLE.extended() as table:
        table.replace(replace(lookup("tanh"), gradient=gradient_of("multiply(g, y)")))
        assert "not close" in fails(drawn)
        smallest = shrink(drawn)
    assert (smallest.strategy, smallest.optimizer, smallest.clip) == ("1/1/1/1", "sgd", None)
    assert smallest.layers == layers[:2]
