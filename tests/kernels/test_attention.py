"""Attention with grouped heads, with masks and without, and of several requests, beside softmax in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from distir_relax.kernels import attention
from distir_relax.kernels.attention import RequestsAttention, attend, unless_all_true
from distir_relax.kernels.native import attend_requests
from distir_relax.kernels.recorded_ops import recorded
from distir_relax.kernels.recording import Recording
from distir_relax.kernels.requests import Request, States


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    repeats: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    times = torch.tensor(repeats or [q.shape[1] // k.shape[1]] * k.shape[1])
    k, v = (x.double().repeat_interleave(times, 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(("heads", "groups", "repeats"), [(9, 3, ()), (5, 1, ()), (3, 3, ()), (6, 3, (3, 1, 2))])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", ["", "all heads", "each head", "each head alike", "rows", "added"])
def test_attention(heads: int, groups: int, repeats: tuple[int, ...], rows: int, masked: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, t, width, generator=generator)
        for n, t, width in ((heads, rows, 7), (groups, 11, 7), (groups, 11, 5))
    )
    shape = {
        "": (), "all heads": (2, 1, rows, 11), "each head": (2, heads, rows, 11), "each head alike": (heads, rows, 11),
        "rows": (rows, 11), "added": (1, heads, 1, 11),
    }[masked]  # fmt: skip
    mask = torch.rand(shape, generator=generator) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    added = torch.zeros(shape).masked_fill(~mask, -math.inf) if masked == "added" and mask is not None else mask
    y = attend(q, k, v, added, 0.3, repeats)
    assert y.shape == (2, heads, rows, 5)
    torch.testing.assert_close(y.double(), exact(q, k, v, mask, 0.3, repeats), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "groups", "repeats"), [(9, 3, ()), (3, 3, ()), (6, 3, (3, 1, 2)), (0, 0, ())])
@pytest.mark.parametrize(("batch", "rows", "tokens"), [(1, 1, 1), (3, 7, 7), (2, 130, 130), (2, 3, 7)])
def test_attention_of_a_recorded_step(
    batch: int, rows: int, tokens: int, heads: int, groups: int, repeats: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Masks that are constants of each form, and one that the step computes; rows and heads in either order."""
    generator = torch.Generator().manual_seed(rows)

    lower = torch.ones(rows, tokens, dtype=torch.bool).tril()
    holes = torch.rand(batch, 1, rows, tokens, generator=generator) < 0.5
    holes[..., 0] = True
    window = (lower & ~lower.tril(-3)).expand(batch, 1, rows, tokens)
    row = torch.ones(1, tokens, dtype=torch.bool)
    added = torch.randn(rows, tokens, generator=generator).to(dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    masks = {"none": None, "lower": lower, "holes": holes, "window": window, "row": row, "added": added}
    for name, turned in product((*masks, "causal", "computed"), (True, False)):
        step = Recording()
        sizes = [(heads, rows), (groups, tokens), (groups, tokens)]
        orders = [(batch, m, n, 8) if turned else (batch, n, m, 8) for n, m in sizes]
        given = [step.input(torch.zeros(order, dtype=dtype)).transpose(1, 2 if turned else 1) for order in orders]
        read = step.input(lower) if name == "computed" else masks.get(name)
        with torch.inference_mode(), recorded(step):
            y = attend(*given, read, 0.3, repeats, name == "causal")
        is_consecutive = name in ("none", "lower", "window", "row", "causal", *("holes",) * (tokens == 1))
        is_native = is_consecutive and rows == tokens and heads and dtype != torch.float64
        assert step.native_calls == (is_native and (turned or batch == 1))
        for _ in range(2):
            for x in given:
                x.copy_(torch.randn(x.shape, generator=generator))
            if name == "computed" and read is not None:
                read.copy_(window[0, 0] if rows == tokens else lower)
            with torch.inference_mode():
                step.run()
            expected = attend(*given, lower if name == "causal" else read, 0.3, repeats)
            torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "repeats"), [(9, 3, ()), (5, 5, ()), (6, 3, (3, 1, 2))])
def test_all_rows_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, repeats: tuple[int, ...], dtype: torch.dtype
) -> None:
    """By the native kernel if rows attend to consecutive keys, by torch if not."""
    monkeypatch.setattr(attention, "_LEAST_SCORES", 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, 101, n, width, generator=generator).to(dtype).transpose(1, 2)
        for n, width in ((heads, 7), (groups, 7), (groups, 5))
    )
    before = torch.ones(101, 101, dtype=torch.bool).tril()
    random = (torch.rand(3, 1, 101, 101, generator=generator) < 0.6) | torch.eye(101, dtype=torch.bool)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mask, causal, shown in (
        (None, False, None),
        (None, True, before),
        (before, False, before),
        (random, False, random),
    ):
        y = attend(q, k, v, mask, 0.3, repeats, causal)
        torch.testing.assert_close(y.double(), exact(q, k, v, shown, 0.3, repeats), **tolerance)
    apart = (x.contiguous() for x in (q, k, v))
    torch.testing.assert_close(
        attend(*apart, None, 0.3, repeats, True).double(), exact(q, k, v, before, 0.3, repeats), **tolerance
    )


@pytest.mark.parametrize("window", [0, 17], ids=["causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "groups", "repeats"), [(9, 3, ()), (5, 5, ()), (6, 3, (3, 1, 2))])
def test_some_rows_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, repeats: tuple[int, ...], dtype: torch.dtype, window: int
) -> None:
    """By the native kernel to the bit; in float64, by torch, in blocks of a few rows."""
    monkeypatch.setattr(attention, "_LEAST_SCORES", 0)
    monkeypatch.setattr(attention, "MOST_SCORES", 2000)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 101, n, width, generator=generator).to(dtype)
        for n, width in ((heads, 7), (groups, 7), (groups, 5))
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    ends = torch.arange(1, 102)
    bounds = torch.stack([(ends - window).clamp(0) if window else ends * 0, ends], 1)
    whole = attend(q.transpose(1, 2), k, v, bounds, 0.3, repeats)
    for rows in ([*range(20), *range(60, 101)], [*range(20, 60)], [0], [100], [3, 50]):
        some = q[:, rows].transpose(1, 2)
        y = attend(some, k, v, bounds[rows], 0.3, repeats)
        if dtype == torch.float64:
            torch.testing.assert_close(y, whole[:, :, rows], rtol=1e-13, atol=1e-13)
            mask = attention.within_bounds(bounds[rows], 101)
            torch.testing.assert_close(y, exact(some, k, v, mask, 0.3, repeats), rtol=1e-13, atol=1e-13)
        elif len(rows) > 1:
            assert torch.equal(y, whole[:, :, rows])
        else:
            torch.testing.assert_close(y, whole[:, :, rows], rtol=1e-2, atol=1e-2)


def test_a_mask_that_is_all_true_is_none() -> None:
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert unless_all_true(mask) is None
    mask[2, 4] = False
    assert unless_all_true(mask) is mask


Layout = tuple[tuple[int, ...] | None, tuple[int, ...] | None, int]
"""The shape of a view of a state, -1 along the tokens, its order of dims, and the dim of the tokens in the state."""
BY_HEAD: Layout = (None, None, 2)
BY_TOKEN: Layout = ((1, -1, 3, 19), (0, 2, 1, 3), 1)


class Step:
    """Requests with random states of three heads: keys by head, values by token, of `width` and 19 elements."""

    def __init__(
        self, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, group: int | tuple[int, ...], room: int = 3,
        width: int = 7,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.repeats = (group,) * 3 if isinstance(group, int) else group
        rows, queries = sum(new for _, new in sizes), width * sum(self.repeats)
        self.requests = [
            Request(
                past, new, 1, States({"k": randn(1, 3, past + new + room, width), "v": randn(1, past + new + room, 57)})
            )
            for past, new in sizes
        ]
        # As strided views of one tensor, as joined products of a model give them.
        whole = randn(1, rows, queries + 3 * width + 57)
        q, k, self.v = torch.split(whole, [queries, 3 * width, 57], 2)
        self.q, self.k = (x.view(1, rows, -1, width).transpose(1, 2) for x in (q, k))
        self.masks: list[torch.Tensor | None] = [
            None if new == 1 else torch.ones(new, past + new, dtype=torch.bool).tril(past) for past, new in sizes
        ]

    def run(self) -> torch.Tensor:
        caches = (("k", BY_HEAD[2], *BY_HEAD[:2]), ("v", BY_TOKEN[2], *BY_TOKEN[:2]))
        repeats = self.repeats if len(set(self.repeats)) > 1 else ()
        return RequestsAttention(self.requests).attend(self.q, self.k, self.v, self.masks, 0.3, caches, repeats)

    def expected(self) -> torch.Tensor:
        parts, row = [], 0
        for request, mask in zip(self.requests, self.masks, strict=True):
            here = slice(row, row + request.new)
            k = torch.cat([request.states["k"][:, :, : request.past], self.k[:, :, here]], 2)
            v = torch.cat([request.states["v"][:, : request.past], self.v[:, here]], 1)
            values = v.view(1, -1, 3, 19).transpose(1, 2)
            parts.append(exact(self.q[:, :, here], k, values, mask, 0.3, self.repeats))
            row += request.new
        return torch.cat(parts, 2)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group", [1, 3, (3, 1, 2)])
def test_requests_of_a_step(
    monkeypatch: pytest.MonkeyPatch, native: str, dtype: torch.dtype, group: int | tuple[int, ...]
) -> None:
    if native == "0":
        monkeypatch.setattr("distir_relax.kernels.attention.attend_requests", lambda *_: None)
    step = Step([(0, 1), (15, 1), (4, 3), (16, 1), (0, 2), (37, 1), (2, 1)], dtype, group)
    masked = torch.arange(38) > 20
    step.masks[5] = masked[None]
    expected = step.expected()
    y = step.run()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    row = 0
    for request in step.requests:
        past, new = request.past, request.new
        assert torch.equal(request.states["k"][:, :, past : past + new], step.k[:, :, row : row + new])
        assert torch.equal(request.states["v"][:, past : past + new], step.v[:, row : row + new])
        row += new


@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize("width", [64, 75])
def test_bfloat16_with_its_instruction_and_without(monkeypatch: pytest.MonkeyPatch, dots: bool, width: int) -> None:
    if not dots:
        only = lambda *given: None if given[4] else attend_requests(*given)  # noqa: E731
        monkeypatch.setattr("distir_relax.kernels.attention.attend_requests", only)
    step = Step([(0, 40), (70, 1), (3, 129)], torch.bfloat16, 3, width=width)
    expected = step.expected()
    torch.testing.assert_close(step.run().double(), expected, rtol=1e-2, atol=1e-2)
    assert not kernel_leaves(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_change_no_bit_of_a_request(dtype: torch.dtype) -> None:
    step = Step([(5, 1), (90, 1), (2, 4), (33, 1)], dtype, 3)
    together, row = step.run(), 0
    for number, request in enumerate(step.requests):
        alone = Step([(5, 1), (90, 1), (2, 4), (33, 1)], dtype, 3)
        rows = slice(row, row + request.new)
        alone.requests, alone.masks = [alone.requests[number]], [alone.masks[number]]
        alone.q, alone.k, alone.v = alone.q[:, :, rows], alone.k[:, :, rows], alone.v[:, rows]
        assert torch.equal(alone.run(), together[:, :, rows])
        row += request.new


def test_elements_after_the_tokens_and_extreme_scores_do_no_harm() -> None:
    step = Step([(3, 1), (20, 1)], torch.float32, 2)
    step.q.mul_(1e4)
    for request in step.requests:
        request.states["k"][:, :, request.past :] = math.nan
        request.states["v"][:, request.past :] = math.nan
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("past", [0, 63, 100])
@pytest.mark.parametrize("group", [1, 5, 100, (1, 7, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_row_does_not_depend_on_how_a_prompt_is_cut(
    past: int, group: int | tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    sizes = (1, 2, 17, 25)
    step = Step([(past, sum(sizes))], dtype, group, room=0)
    expected, exact_result = step.run(), step.expected()
    torch.testing.assert_close(expected.double(), exact_result, rtol=tolerance, atol=tolerance)
    q, k, v, states = step.q, step.k, step.v, step.requests[0].states
    row = 0
    for size in sizes:
        rows = slice(row, row + size)
        step.requests = [Request(past + row, size, 1, states)]
        step.masks = [torch.ones(size, past + row + size, dtype=torch.bool).tril(past + row)]
        step.q, step.k, step.v = q[:, :, rows], k[:, :, rows], v[:, rows]
        assert torch.equal(step.run(), expected[:, :, rows])
        row += size


@pytest.mark.parametrize("window", [1, 3, 70])
def test_windows(window: int) -> None:
    step = Step([(150, 9)], torch.float32, 3)
    positions = torch.arange(159)
    first = torch.arange(151, 160)[:, None] - window
    step.masks = [((positions >= first) & (positions < first + window))[None, None]]
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-5, atol=1e-6)
    assert not kernel_leaves(step)


def kernel_leaves(step: Step) -> list[int]:
    """The numbers of the requests that the native kernel does not take."""
    q, k = step.q, step.k
    plan = attention._plan(step.requests, step.masks, q, k, step.v.view(1, -1, 3, 19).transpose(1, 2), step.repeats)
    return [number for number, _ in plan.others]


def test_other_masks_are_left_to_torch() -> None:
    sizes = [(0, 5), (20, 3), (20, 3), (20, 3), (20, 3), (20, 3)]
    step = Step(sizes, torch.float32, 3)
    causal = step.masks[1]
    assert causal is not None
    holes, of_heads = causal.clone(), causal.expand(9, 3, 23)
    holes[1, 3] = False
    added = torch.randn(3, 23, generator=torch.Generator().manual_seed(0))
    step.masks[2:5] = [holes, of_heads, None]
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-5, atol=1e-6)
    assert kernel_leaves(step) == [2, 3]
    step.masks[1] = added
    assert kernel_leaves(step) == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_is_not_hidden(dtype: torch.dtype) -> None:
    step = Step([(20, 1), (4, 1)], dtype, 3)
    step.q[0, 4, 0] = math.nan
    y = step.run()
    assert y[0, 4, 0].isnan().all()
    assert y.isnan().sum() == 19
