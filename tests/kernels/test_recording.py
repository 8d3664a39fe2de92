"""Recorded steps compute what their ops compute one by one, and take memory once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distir_relax.kernels import elementwise, norms, positions
from distir_relax.kernels.native import rms_norm
from distir_relax.kernels.native.call_list import CallList
from distir_relax.kernels.packing import pack_joined, pack_linear
from distir_relax.kernels.quantized import quantize_int4, quantize_int8
from distir_relax.kernels.quantized.joined import pack_joined_quantized
from distir_relax.kernels.quantized.linear import pack_quantized
from distir_relax.kernels.recorded_ops import recorded
from distir_relax.kernels.recording import Recording, recording, runs_whole
from distir_relax.kernels.step_memory import Memory

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


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Programs run in this mode, whose tensors others may not change."""
    with torch.inference_mode():
        yield


def record(compute: Callable[..., Any], *operands: torch.Tensor) -> tuple[Recording, list[torch.Tensor], Any]:
    """Return the step of a function, its operands in it, and its result."""
    step = Recording()
    mine = []
    for x in operands:
        # In the memory order of the operand, if that has no gaps.
        base = step.input(x)
        is_dense = x.numel() and x.numel() == 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        mine.append(base.as_strided(x.shape, x.stride()).copy_(x) if is_dense else base)
    with recorded(step):
        result = compute(*mine)
    return step, mine, result


def check(
    compute: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], tolerance: float, python: int = 0,
    expected: Callable[..., torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Compare a step with the function, while it is recorded and later; at most `python` functions are not native."""
    step, mine, result = record(compute, *operands)
    assert not step.failure
    assert step.python_calls <= python
    for seed in (0, 1, 2):
        values = operands if not seed else [drawn(*x.shape, dtype=x.dtype, seed=seed) for x in operands]
        if seed:
            for operand, value in zip(mine, values, strict=True):
                operand.copy_(value)
            step.run()
        wanted = (expected or compute)(*values)
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_elementwise_ops(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype != torch.bfloat16 else 8e-3
    ops: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor] | None] = {
        torch.add: None, torch.mul: None, torch.sub: None, lambda a, b: a / (b * b + 1.0): None,
        lambda a, b: F.silu(a) + F.gelu(b): None,
        lambda a, b: 1.5 - F.relu(a) * 2 + F.gelu(b, approximate="tanh"): None,
        # In the memory of an operand, which is a result of the step.
        lambda a, b: torch.add(c := a * 2, b, out=c): lambda a, b: a * 2 + b,
        elementwise.silu_multiply: lambda a, b: F.silu(a) * b,
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
    for compute, expected in ops.items():
        for number, (a, b) in enumerate(pairs):
            if compute is elementwise.silu_multiply and a.shape != b.shape:
                continue
            # Rows of the first three are those of a matrix.
            check(compute, (a, b), tolerance, 0 if number < 3 and dtype != torch.float64 else 9, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [127, 16, 48])
def test_norms_and_positions(dtype: torch.dtype, width: int) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    x, weight, bias = drawn(3, 5, width, dtype=dtype), drawn(width, dtype=dtype), drawn(width, dtype=dtype, seed=3)
    for given, python in ((x, 0), (x.transpose(0, 1), 1)):
        check(lambda y: F.layer_norm(y, (width,), weight, bias, 1e-5), (given,), tolerance, python)
        for rounded in (False, True):
            check(lambda y, r=rounded: norms.rms_norm(y, weight, 1e-5, r), (given,), tolerance, python)
    width += width % 2
    heads = drawn(2, 7, 3, width, dtype=dtype).transpose(1, 2)
    angles = drawn(1, 1, 7, width, dtype=dtype), drawn(1, 1, 7, width, dtype=dtype, seed=1)
    check(positions.rotary, (heads, *angles), tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_linear_maps(dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype != torch.bfloat16 else 5e-2
    weight, other, bias = drawn(127, 64, dtype=dtype), drawn(5, 64, dtype=dtype), drawn(127, dtype=dtype)
    quantized = [quantize_int8(weight), quantize_int4(weight)] if dtype != torch.float64 else []
    maps: list[Callable[..., torch.Tensor]] = [pack_linear(weight, rows=1), pack_linear(weight, bias, rows=1)]
    maps += [pack_quantized(*parts, dtype=dtype, rows=1) for parts in quantized]
    joined = [pack_joined([weight, other], transposed=False, biased=False, rows=1)]
    joined += [
        pack_joined_quantized([*make(weight), *make(other)], dtype=dtype, rows=1)
        for make in (quantize_int8, quantize_int4) if quantized
    ]  # fmt: skip
    maps += [lambda y, j=maps_of_one: j(y)[1] for maps_of_one in joined]
    for packed in maps:
        for rows in (1, 3, 40):
            for x in (drawn(rows, 64, dtype=dtype), drawn(64, rows, dtype=dtype).t()):
                check(packed, (x,), tolerance, 2)


def test_views_are_no_part_of_a_step() -> None:
    def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.split(3, 1)[1].max(1)
        return x.t(), x.t().reshape(-1), values, places, x[:2].unsqueeze(0).expand(3, -1, -1)

    step, (mine,), (turned, flat, values, places, expanded) = record(compute, drawn(5, 6))
    assert step.python_calls == 2
    assert turned.data_ptr() == mine.data_ptr() == expanded.data_ptr() != flat.data_ptr()
    for seed in (3, 4):
        x = drawn(5, 6, seed=seed)
        mine.copy_(x)
        step.run()
        assert torch.equal(flat, x.t().reshape(-1))
        assert torch.equal(values, x[:, 3:].max(1).values)
        assert torch.equal(places, x[:, 3:].max(1).indices)
        assert torch.equal(expanded[2], x[:2])


def test_inputs_are_written_before_the_step() -> None:
    """The memory of an input that is first used late is not that of an earlier value."""
    step = Recording()
    x = step.input(drawn(5, 127))
    with recorded(step):
        y = F.relu(F.relu(x) + 1)
        z = step.input(drawn(5, 127, seed=1))
        result = y * z
    for seed in (2, 3):
        values = drawn(5, 127, seed=seed), drawn(5, 127, seed=seed + 5)
        x.copy_(values[0])
        z.copy_(values[1])
        step.run()
        torch.testing.assert_close(result, F.relu(F.relu(values[0]) + 1) * values[1])


class Transfer:
    def __init__(self, value: float) -> None:
        self.value = value


def test_functions_that_read_elements_run_whole() -> None:
    seen: list[float] = []

    @runs_whole
    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0, 0]))
        return x

    @runs_whole
    def started(x: torch.Tensor) -> Transfer:
        return Transfer(float(x.sum()))

    @runs_whole
    def finished(x: Transfer, scale: torch.Tensor) -> list[torch.Tensor]:
        assert recording() is None
        return [x.value * scale, scale]

    def compute(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert recording() is not None
        transfer = started(noted(x))
        y, scale = finished(transfer, x + 1)
        return y, scale

    step, (mine,), (y, scale) = record(compute, drawn(3, 4))
    assert not step.failure
    for seed in (0, 3, 4):
        x = drawn(3, 4, seed=seed)
        if seed:
            mine.copy_(x)
            step.run()
        assert seen[-1] == x[0, 0]
        torch.testing.assert_close(scale, x + 1)
        torch.testing.assert_close(y, float(x.sum()) * (x + 1))


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x * float(x.max()), "depends on elements"), (lambda x: x[x > 0], "depends on elements"),
        (lambda x: torch.zeros(3).add_(x.sum()), "changes a constant"),
        (lambda x: (x + (c := torch.zeros(4))) * c.fill_(2), "changes a constant"),
        (lambda x: (x + (c := torch.zeros(4))) * c[:].fill_(2), "changes a constant"),
        (lambda x: torch.nonzero(x), "depends on elements"),
        (lambda x: torch.ones(7, 7).index_copy_(0, torch.tensor([1]), x[:1, :1].expand(1, 7)), "changes a constant"),
    ],
)  # fmt: skip
def test_what_cannot_run_again_is_computed_nevertheless(compute: Callable[..., Any], reason: str) -> None:
    step, _, result = record(lambda x: compute(F.relu(x - 0.5)) * 2, drawn(3, 4))
    assert reason in step.failure
    torch.testing.assert_close(result, compute(F.relu(drawn(3, 4) - 0.5)) * 2)


def test_a_view_of_a_weight_is_not_changed() -> None:
    weight = torch.zeros(3, 4)
    step, _, result = record(lambda x: x + weight.view(-1).add_(1).view(3, 4), drawn(3, 4))
    assert "changes a constant" in step.failure
    torch.testing.assert_close(result, drawn(3, 4) + 1)


def test_constants_are_computed_once() -> None:
    step, (mine,), result = record(lambda x: x * torch.zeros(4).fill_(2).add_(torch.ones(4)) + 1, drawn(3, 4))
    assert not step.failure
    mine.copy_(drawn(3, 4, seed=1))
    step.run()
    torch.testing.assert_close(result, 3 * drawn(3, 4, seed=1) + 1)
    assert step.python_calls <= 1


def test_large_results_end_the_recording() -> None:
    step = Recording(most_bytes=100)
    x = step.input(drawn(3, 4))
    with recorded(step):
        result = F.relu(x.repeat(5, 1)) + 1
    assert step.failure == "its results are large"
    torch.testing.assert_close(result, F.relu(drawn(3, 4).repeat(5, 1)) + 1)


def test_random_numbers_are_others_in_each_run() -> None:
    step, _, result = record(lambda x: torch.rand(3, 4) + 0 * x, drawn(3, 4))
    seen = [result.clone()]
    for _ in range(2):
        step.run()
        seen.append(result.clone())
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 3


def test_a_kernel_that_fails_ends_the_list() -> None:
    kernel = rms_norm("float32", "float32", False)
    if kernel is None:
        pytest.fail("native kernels are needed")
    x, weight, y, z = drawn(3, 16), drawn(16), torch.zeros(3, 16), torch.zeros(3, 16)
    calls = CallList()
    calls.add(kernel, x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, 16, 1e-5, 1)
    calls.run()
    assert torch.equal(y, norms.rms_norm(x, weight, 1e-5))
    y.zero_()
    calls.add(kernel, x.data_ptr())
    calls.add(kernel, x.data_ptr(), weight.data_ptr(), z.data_ptr(), 3, 16, 1e-5, 1)
    with pytest.raises(RuntimeError, match="a kernel of a list of calls has failed"):
        calls.run()
    assert len(calls) == 3
    assert y.any()
    assert not z.any()
