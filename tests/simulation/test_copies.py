"""Which views copy, against torch: random chains of views of random shapes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from benchmarks.memory_programs import TUNED, UNSEEN
from benchmarks.peak_memory import peaks
from distir_relax.ir import Function, Op, PlacedType, Value
from distir_relax.ops import evaluate
from distir_relax.simulation.copies import layout_copies


def grouped(draw: random.Random, shape: list[int]) -> tuple[int, ...]:
    """Another shape of as many elements: dims joined, divided and put in."""
    sizes = list(shape)
    for _ in range(3):
        kind = draw.randrange(3)
        place = draw.randrange(len(sizes))
        if kind == 0 and place + 1 < len(sizes):
            sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        elif kind == 1 and sizes[place] % 2 == 0 and sizes[place]:
            sizes[place : place + 1] = [2, sizes[place] // 2]
        elif kind == 2 and len(sizes) < 6:
            sizes.insert(place, 1)
    return tuple(sizes)


def next_op(draw: random.Random, shape: list[int]) -> tuple[str, dict[str, object]]:
    kind = draw.choice(["reshape", "reshape", "permute_dims", "broadcast_to", "strided_slice", "nn.relu", "split"])
    dim = draw.randrange(len(shape))
    if kind == "reshape":
        return kind, {"shape": grouped(draw, shape)}
    if kind == "permute_dims":
        return kind, {"axes": tuple(draw.sample(range(len(shape)), len(shape)))}
    if kind == "broadcast_to":
        return kind, {"shape": (draw.choice([1, 3]), *(draw.choice([n, 2]) if n == 1 else n for n in shape))}
    if kind == "strided_slice":
        end = max(1, shape[dim] - draw.randrange(2))
        return kind, {"axes": (dim,), "begin": (0,), "end": (end,), "strides": (draw.choice([1, 1, 2]),)}
    if kind == "split":
        first = draw.randrange(shape[dim] + 1)
        return kind, {"axis": dim, "sizes": (first, shape[dim] - first)}
    return kind, {}


@pytest.mark.parametrize("seed", range(60))
def test_reshapes_copy_where_torch_copies(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randrange(1, 5))]
    tensor = torch.zeros(shape)

    def value(name: str, x: torch.Tensor) -> Value:
        return Value(name, PlacedType(tuple(x.shape), "float32", (0,)))

    ops, expected, current = [], set(), value("x", tensor)
    for number in range(8):
        if not tensor.dim() or tensor.numel() > 5000:
            break
        name, attrs = next_op(draw, list(tensor.shape))
        op = Op(name, (current,), (), attrs)
        results = evaluate(op, [tensor])
        values = tuple(value(f"v{number}.{i}", x) for i, x in enumerate(results))
        ops.append(Op(name, (current,), values, attrs))
        shares = results[0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if name == "reshape" and not shares and math.prod(tensor.shape):
            expected.add(values[0].name)
        chosen = draw.randrange(len(results))
        current, tensor = values[chosen], results[chosen]
    assert layout_copies(Function("main", (), tuple(ops), ())).views == expected


NAMES = ["mlp zero=3 on 3", "resnet trained", "large output tensor", "plain rnn trained", "pieces trained"]


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_real_ranks(name: str) -> None:
    """Copies of collectives along inner dims, of convolutions and reshapes; outputs assembled on rank 0; deletion of
    small values and of views of large storage."""
    chosen = [program for program in (*TUNED, *UNSEEN) if program.name == name]
    ((_, predicted, measured),) = peaks(chosen)
    assert measured == pytest.approx(predicted, rel=0.05)
