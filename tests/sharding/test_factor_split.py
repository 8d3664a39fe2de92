"""Boundaries of joined dims are those that are carried op by op, wherever they nest."""

from __future__ import annotations

import random

import pytest

from distir_relax.ir import Function, TensorType, Value
from distir_relax.ops import Builder
from distir_relax.sharding.factor_split import JoinedBoundaries, PropagatedBoundaries, Rules, find_boundaries


def reshaped(seed: int) -> Function:
    """Reshapes, transposes, sums and products of values of 2 x 3 x 5 x 7 elements, in any order."""
    chosen = random.Random(seed)
    g = Builder()
    values: list[Value] = [g.input("x", TensorType((2, 3, 5, 7), "float32"))]
    for _ in range(24):
        x = chosen.choice(values)
        shape = x.tensor.shape
        kind = chosen.choice(("reshape", "permute_dims", "add", "relu", "matmul"))
        if kind == "reshape":
            parts = chosen.choice(((210,), (6, 35), (30, 7), (2, 105), (7, 5, 3, 2), (14, 15), (10, 21)))
            values.append(g.emit(kind, x, shape=parts))
        elif kind == "permute_dims":
            axes = list(range(len(shape)))
            chosen.shuffle(axes)
            values.append(g.emit(kind, x, axes=tuple(axes)))
        elif kind == "add":
            values.append(g.emit(kind, x, chosen.choice([v for v in values if v.tensor.shape == shape])))
        elif kind == "matmul" and len(shape) > 1:
            values.append(g.emit(kind, x, g.input(f"w{len(values)}", TensorType((shape[-1], shape[-1]), "float32"))))
        else:
            values.append(g.emit("nn.relu", x))
    return g.function("main", [("y", values[-1])])


@pytest.mark.parametrize("seed", range(40))
def test_both_ways_find_the_same_where_boundaries_nest(seed: int) -> None:
    rules = Rules.of(reshaped(seed))
    joint, carried = JoinedBoundaries(rules), PropagatedBoundaries(rules).run()
    nest = joint.run()
    assert nest == (not any(carried.conflicts(number) for number in range(len(rules.rules))))
    assert isinstance(find_boundaries(rules), JoinedBoundaries if nest else PropagatedBoundaries)
    if not nest:
        return
    assert joint.split_values == carried.split_values
    for name, shape in rules.shapes.items():
        for dim in range(len(shape)):
            assert joint.dim_boundaries(name, dim) == carried.dim_boundaries(name, dim), name
    for number, rule in enumerate(rules.rules):
        for factor in range(len(rule.factors)):
            assert joint.factor_boundaries(number, factor) == carried.factor_boundaries(number, factor)


def test_some_nest_and_some_do_not() -> None:
    found = [JoinedBoundaries(Rules.of(reshaped(seed))).run() for seed in range(40)]
    assert 5 < sum(found) < 35
