"""`Semantics.moved` against the ops themselves, run on tensors that contain the numbers of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops import entries, evaluate, infer, lookup
from distir_relax.ops.table import PADDING, Positions, reshaped

SHAPE = (4, 6, 5)
LOCAL: dict[str, list[tuple[int, Mapping[str, Any]]]] = {
    "strided_slice": [(1, {"axes": (0, 2), "begin": (1, 0), "end": (4, 5), "strides": (2, 3)})],
    "slices": [(1, {"dim": 1, "intervals": ((4, 6), (0, 0), (1, 3))})],
    "concat": [(3, {"axis": 1})],
    "split": [(1, {"axis": 1, "sizes": (3, 0, 1, 2)})],
    "pad": [(1, {"low": (0, 2, 0), "high": (1, 0, 3), "value": PADDING})],
    "pad_tail": [
        (1, {"dim": 1, "blocks": 1, "size": 6, "padded": 7, "value": PADDING, "rank": 3, "shape": SHAPE}),
        (1, {"dim": 1, "blocks": 3, "size": 2, "padded": 4, "value": PADDING, "rank": 3, "shape": SHAPE}),
    ],
    "trim_tail": [
        (1, {"dim": 1, "blocks": 1, "size": 4, "padded": 6, "value": 0, "rank": 3, "shape": SHAPE}),
        (1, {"dim": 1, "blocks": 2, "size": 1, "padded": 3, "value": 0, "rank": 3, "shape": SHAPE}),
    ],
    "reshape": [(1, {"shape": shape}) for shape in ((24, 5), (120,), (2, 2, 6, 5, 1), (4, 3, 10), (1, 4, 30))],
}
COLLECTIVES: dict[str, Mapping[str, Any]] = {
    "all_reduce": {"op": "max"},
    "all_gather": {"dim": 1, "sizes": (6, 6, 6)},
    "reduce_scatter": {"dim": 1, "sizes": (3, 1, 2), "op": "max"},
    "shard": {"dim": 1, "sizes": (3, 1, 2)},
    "all_to_all": {"split_dim": 1, "split_sizes": (1, 3, 2), "concat_dim": 2, "concat_sizes": (5, 5, 5)},
    "resplit": {"dim": 1, "pieces": ((1, 2, 3), (0, 6, 0), (2, 2, 2))},
}


def numbered(positions: Positions) -> torch.Tensor:
    """The tensor of the numbers of its elements; those of padding are one number."""
    total = np.zeros((), np.int64)
    for vector in positions:
        total = total[..., None] + vector
    return torch.from_numpy(np.where(total < 0, PADDING, total))


def operand(number: int) -> Positions:
    """Positions of a tensor of `SHAPE`, those of dim 1 in another order for each number."""
    order = np.random.default_rng(number).permutation(SHAPE[1])
    return [np.arange(SHAPE[0]) * 30, order * 5 + 1000 * number, np.arange(SHAPE[2])]


def test_all_such_ops_are_tested() -> None:
    names = {entry.name for entry in entries() if entry.semantics.moved is not None}
    started = {entry.semantics.started for entry in entries()}
    assert names - started == set(LOCAL) | set(COLLECTIVES)


@pytest.mark.parametrize("name", LOCAL)
def test_ops_of_a_device(name: str) -> None:
    for count, attrs in LOCAL[name]:
        parts = [operand(number) for number in range(count)]
        tensors = [numbered(part) for part in parts]
        kinds = [TensorType(tuple(x.shape), "int64") for x in tensors]
        results = infer(name, kinds, attrs)
        values = [Value(f"x{i}", kind) for i, kind in enumerate((*kinds, *results))]
        op = Op(name, tuple(values[:count]), tuple(values[count:]), attrs)
        moved = lookup(name).semantics.moved
        assert moved is not None
        if name == "reshape":
            parts[0][1] = np.arange(SHAPE[1]) * 5
            tensors = [numbered(parts[0])]
        for found, expected in zip(moved(parts, attrs), evaluate(op, tensors), strict=True):
            assert torch.equal(numbered(found), expected), attrs


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    entry, attrs = lookup(name), COLLECTIVES[name]
    # Where devices exchange parts, they have the same elements of one dim, and others of the other.
    same = "op" in attrs or "split_dim" in attrs
    parts: Sequence[Positions] = [operand(0 if same else number) for number in range(3)]
    if "split_dim" in attrs:
        parts = [[a, b, c + 1000 * number] for number, (a, b, c) in enumerate(parts)]
    assert entry.semantics.moved is not None
    assert entry.semantics.collective_semantics is not None
    expected = entry.semantics.collective_semantics([numbered(part) for part in parts], attrs)
    for actual, tensor in zip(entry.semantics.moved(parts, attrs), expected, strict=True):
        assert torch.equal(numbered(actual), tensor)


def test_elements_that_are_no_sums_are_refused() -> None:
    positions = operand(3)
    with pytest.raises(ValueError, match="in no order of"):
        reshaped(positions, (4, 3, 2, 5))
