"""Steps that are bound compute what their ops compute one by one, and take memory once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional as F

from distir_relax.kernels import elementwise, norms, positions
from distir_relax.kernels.bound_step import BoundStep, Memory
from distir_relax.kernels.native import rms_norm
from distir_relax.kernels.native.call_list import CallList
from distir_relax.kernels.packing import pack_joined, pack_linear
from distir_relax.kernels.quantized import quantize_int4, quantize_int8
from distir_relax.kernels.quantized.joined import pack_joined_quantized
from distir_relax.kernels.quantized.linear import pack_quantized

FLOATS = (torch.float32, torch.bfloat16)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def test_tensors_that_live_at_once_do_not_share_memory() -> None:
    rng, memory = random.Random(0), Memory()
    live: list[tuple[torch.Tensor, torch.Tensor]] = []
    most = 0
    for number in range(500):
        if live and rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
        shape = tuple(rng.choice([0, 1, 3, 127, 300]) for _ in range(rng.randint(0, 2)))
        tensor = memory.empty(shape, rng.choice([torch.float32, torch.int8, torch.bfloat16]))
        tensor.fill_(number % 100)
        # A view keeps the memory of its base.
        live.append((tensor.reshape(-1)[::2], tensor.reshape(-1)[::2].clone()))
        most = max(most, sum(x.untyped_storage().nbytes() for x, _ in live))
        del tensor
        assert all(torch.equal(mine, copy) for mine, copy in live)
    assert memory.size < 3 * most + (1 << 17)


def test_memory_is_used_again_after_the_last_use() -> None:
    memory = Memory()
    for _ in range(100):
        first = memory.empty((3, 1000), torch.float32)
        second = memory.empty((5, 127), torch.bfloat16)[1:]
        assert first.data_ptr() != second.data_ptr()
        del first, second
    assert memory.size == 1 << 16


def bound(add: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a function that runs the step of an op with other values of its operands."""
    step = BoundStep()
    result = add(step, *operands)

    def run(*values: torch.Tensor) -> torch.Tensor:
        for operand, value in zip(operands, values, strict=True):
            operand.copy_(value)
        step.run()
        return result

    return run


def check(
    add: Callable[..., torch.Tensor], compute: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor],
    tolerance: float,
) -> None:  # fmt: skip
    step = bound(add, *operands)
    for seed in (1, 2):
        # In the memory order of the operands, which the step has seen.
        values = [torch.empty_like(x).copy_(drawn(*x.shape, dtype=x.dtype, seed=seed)) for x in operands]
        found, expected = step(*values), compute(*values)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_elementwise_ops(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype != torch.bfloat16 else 8e-3
    ops: dict[str, Callable[..., torch.Tensor]] = {
        "{0} + {1}": torch.add, "{0} * {1}": torch.mul, "{0} - {1} * T.float32(0.5)": lambda a, b: a - b * 0.5,
        "{0} / (T.float32(1) + exp(-{0})) * {1}": lambda a, b: F.silu(a.double()).to(dtype) * b,
    }  # fmt: skip
    strided = drawn(3, 254, dtype=dtype)[:, 100:227]
    assert strided.stride() == (254, 1)
    pairs = [
        (drawn(127, dtype=dtype), drawn(127, dtype=dtype, seed=5)),
        (drawn(3, 5, 33, dtype=dtype), drawn(33, dtype=dtype)),
        (strided, drawn(3, 127, dtype=dtype)),
        (drawn(1, 4, 16, dtype=dtype), drawn(1, 1, 1, dtype=dtype)),
        (drawn(7, 3, dtype=dtype).t(), drawn(3, 7, dtype=dtype)),
        (drawn(2, 0, 5, dtype=dtype), drawn(5, dtype=dtype)),
    ]
    for expression, compute in ops.items():
        for a, b in pairs:
            kind = torch.broadcast_shapes(a.shape, b.shape), dtype
            check(
                lambda step, *x, e=expression, c=compute, k=kind: elementwise.bind(step, e, c, x, k),
                compute, (a, b), tolerance,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [127, 16, 48])
def test_norms_and_positions(dtype: torch.dtype, width: int) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    x, weight, bias = drawn(3, 5, width, dtype=dtype), drawn(width, dtype=dtype), drawn(width, dtype=dtype, seed=3)
    for given in (x, x.transpose(0, 1)):
        check(
            lambda step, y: norms.bind_layer_norm(step, y, weight, bias, 1e-5),
            lambda y: F.layer_norm(y, (width,), weight, bias, 1e-5), (given,), tolerance,
        )  # fmt: skip
        for rounded in (False, True):
            check(
                lambda step, y, r=rounded: norms.bind_rms_norm(step, y, weight, 1e-5, r),
                lambda y, r=rounded: norms.rms_norm(y, weight, 1e-5, r), (given,), tolerance,
            )  # fmt: skip
    width += width % 2
    heads = drawn(2, 7, 3, width, dtype=dtype).transpose(1, 2)
    angles = drawn(1, 1, 7, width, dtype=dtype), drawn(1, 1, 7, width, dtype=dtype, seed=1)
    check(positions.bind_rotary, positions.rotary, (heads, *angles), tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_linear_maps(dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype != torch.bfloat16 else 5e-2
    weight, other, bias = drawn(127, 64, dtype=dtype), drawn(5, 64, dtype=dtype), drawn(127, dtype=dtype)
    quantized = [quantize_int8(weight), quantize_int4(weight)] if dtype != torch.float64 else []
    maps = [pack_linear(weight, rows=1), pack_linear(weight, bias, rows=1)]
    maps += [pack_quantized(*parts, dtype=dtype, rows=1) for parts in quantized]
    for packed in maps:
        for rows in (1, 3, 40):
            for x in (drawn(rows, 64, dtype=dtype), drawn(64, rows, dtype=dtype).t()):
                check(lambda step, y, p=packed: p.bind(step, y), packed, (x,), tolerance)
    joined = [pack_joined([weight, other], transposed=False, biased=False, rows=1)]
    joined += [
        pack_joined_quantized([*make(weight), *make(other)], dtype=dtype, rows=1)
        for make in (quantize_int8, quantize_int4) if quantized
    ]  # fmt: skip
    for maps_of_one in joined:
        check(
            lambda step, y, j=maps_of_one: j.bind(step, y)[1],
            lambda y, j=maps_of_one: j(y)[1], (drawn(2, 3, 64, dtype=dtype),), tolerance,
        )  # fmt: skip


def test_functions_views_and_checks() -> None:
    x = drawn(5, 6)
    step = BoundStep()
    seen: list[float] = []
    same = step.call(lambda y: seen.append(float(y[0, 0])), x)
    assert same is x
    turned = step.view(lambda y: y.t(), x)
    flat = step.view(lambda y: y.reshape(-1), turned)
    halves = step.view(lambda y: y.split(3, 1), x)
    assert turned.data_ptr() == halves[0].data_ptr() == x.data_ptr() != flat.data_ptr()
    values, places = step.several(lambda y: y.max(1), (halves[1],), ((5,), torch.float32), ((5,), torch.int64))
    for seed in (3, 4):
        x.copy_(drawn(5, 6, seed=seed))
        step.run()
        assert seen[-1] == x[0, 0]
        assert torch.equal(flat, x.t().reshape(-1))
        assert torch.equal(values, x[:, 3:].max(1).values)
        assert torch.equal(places, x[:, 3:].max(1).indices)


def test_what_is_started_is_finished_later() -> None:
    step, counts = BoundStep(), iter(range(9))
    started = step.start(lambda: next(counts), ((3,), torch.float32))
    before = step.python(lambda: torch.full((3,), 7.0), (), ((3,), torch.float32))
    result = step.finish(lambda n: torch.full((3,), float(n)), started)
    total = step.into(lambda x, y: y.copy_(x * 2), result)
    for number in range(3):
        step.run()
        assert before.tolist() == [7.0] * 3
        assert total.tolist() == [2.0 * number] * 3


def test_a_kernel_that_fails_ends_the_list() -> None:
    kernel = rms_norm(16, "float32", "float32", False, False)
    if kernel is None:
        pytest.fail("native kernels are needed")
    x, weight, y, z = drawn(3, 16), drawn(16), torch.zeros(3, 16), torch.zeros(3, 16)
    calls = CallList()
    calls.add(kernel, x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, 1e-5, 1)
    calls.run()
    assert torch.equal(y, norms.rms_norm(x, weight, 1e-5))
    y.zero_()
    calls.add(kernel, x.data_ptr())
    calls.add(kernel, x.data_ptr(), weight.data_ptr(), z.data_ptr(), 3, 1e-5, 1)
    with pytest.raises(RuntimeError, match="a kernel of a list of calls has failed"):
        calls.run()
    assert len(calls) == 3
    assert y.any()
    assert not z.any()
