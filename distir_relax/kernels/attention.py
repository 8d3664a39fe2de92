"""Attention with a mask, which is None if it allows everything: often so for one new position.

In a step of several requests, each attends to its own keys and values. A native kernel does so for all whose rows each
attend to consecutive positions. It computes each row by itself: which others there are changes no bit of its results.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from distir_relax.kernels.native import (
    NUMBERS_OF_BLOCK,
    STORED,
    attend_requests,
    rows_of_block,
    stored_name,
)
from distir_relax.kernels.recording import recording
from distir_relax.kernels.sequence import extend

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.native.load import Kernel
    from distir_relax.kernels.requests import Request

MOST_SCORES = 1 << 22
"""Scores that torch computes at a time, unless a single row has more."""


def unless_all_true(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask, or None if all its elements are true."""
    return None if bool(mask.all()) else mask


def is_causal(mask: torch.Tensor, rows: int, tokens: int) -> bool:
    """Return whether a mask on the processor lets each row attend to the keys up to its own, and to no others.

    It is a boolean one, or has bounds. Kernels need not read it, and skip the keys after a row's own.
    """
    import torch

    if has_bounds(mask):
        return rows == tokens and mask.is_cpu and torch.equal(mask, _causal_bounds(rows))
    if not mask.is_cpu or mask.dtype != torch.bool or rows != tokens or mask.shape[-2:] != (rows, tokens):
        return False
    return bool((mask == _lower_triangle(rows)).all())


def has_bounds(mask: torch.Tensor) -> bool:
    """Return whether a mask has the first key that each row attends to, and the one after the last."""
    import torch

    return mask.dtype == torch.int64


def within_bounds(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the mask (s or 1, t) of bounds as of `attend`, or (b, 1, s, t) of those of each sample."""
    import torch

    keys = torch.arange(tokens, device=bounds.device)
    bounds = bounds if bounds.dim() == 2 else bounds[:, None]
    return (keys >= bounds[..., :1]) & (keys < bounds[..., 1:])


@lru_cache(maxsize=16)
def _causal_bounds(rows: int) -> torch.Tensor:
    import torch

    return torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1)], 1)


@lru_cache(maxsize=16)
def _lower_triangle(rows: int) -> torch.Tensor:
    import torch

    return torch.ones(rows, rows, dtype=torch.bool).tril()


def repeat_heads(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Return keys or values (b, g, t, d) with head `i` repeated `repeats[i]` times in a row."""
    import torch

    return torch.cat([x.narrow(1, i, 1).expand(-1, count, -1, -1) for i, count in enumerate(repeats)], 1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    repeats: Sequence[int] = (), causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of queries (b, h, s, d) to keys (b, g, t, d) and values (b, g, t, e): (b, h, s, e).

    Heads in a row share keys and values: `repeats[i]` of them head `i`, by default equal numbers. `mask` is boolean, or
    added to the scores, and broadcasts to (b, h, s, t); or it has bounds (s or 1, 2), int64: the first key that each
    row attends to, and the one after the last; (b, s, 2) are those of each sample. If `causal`, which takes no mask,
    row `i` attends to the keys up to `i`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    found = recording()
    if found is not None and found.computes(mask):
        # Which form is the fastest depends on the mask, which may be another each time.
        return found.whole(attend, q, k, v, mask, scale, repeats, causal)
    y = _attend_natively(q, k, v, mask, scale, repeats, causal)
    if y is not None:
        return y
    if mask is not None and has_bounds(mask):
        causal = is_causal(mask, q.shape[2], k.shape[2])
        if not causal and math.prod(q.shape[:3]) * k.shape[2] > MOST_SCORES and q.shape[2] > 1:
            return _attend_by_blocks(q, k, v, mask, scale, repeats)
        mask = None if causal else within_bounds(mask, k.shape[2])
    if causal:
        k, v = (repeat_heads(x, repeats) if repeats else x for x in (k, v))
        is_grouped = k.shape[1] != q.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True, scale=scale, enable_gqa=is_grouped)
    if repeats:
        is_by_head = mask is not None and mask.dim() > 2 and mask.shape[-3] > 1
        parts, start = [], 0
        for head, count in enumerate(repeats):
            own = mask.narrow(-3, start, count) if mask is not None and is_by_head else mask
            of_head = (q.narrow(1, start, count), k.narrow(1, head, 1), v.narrow(1, head, 1))
            parts.append(attend(*of_head, own, scale))
            start += count
        return torch.cat(parts, 1)
    groups, heads = k.shape[1], q.shape[1]
    if not heads:
        # Some kernels of torch divide by the number of heads.
        return q.new_zeros((*q.shape[:3], v.shape[3]))
    if groups == heads:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if q.shape[2] == 1:
        # As rows of one head, the heads of a group read its keys once.
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], groups, heads // groups, mask.shape[-1])
        rows = q.reshape(q.shape[0], groups, heads // groups, q.shape[3])
        y = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        return y.reshape(q.shape[0], heads, 1, v.shape[3])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def row_blocks(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None
) -> Iterator[tuple[slice, slice | None, torch.Tensor | None]]:
    """Yield blocks of the rows of `attend`: the rows, the keys that they attend to, and the mask between them.

    The keys are None if there are none, the mask if it allows all. A block has at most `MOST_SCORES` scores, unless a
    single row has more.
    """
    (batch, heads, rows, _), tokens = q.shape, k.shape[2]
    count = max(1, MOST_SCORES // max(1, batch * heads * tokens))
    for start in range(0, max(rows, 1), count):
        block = slice(start, min(start + count, rows))
        if 0 in (batch, heads, rows, tokens):
            yield block, None, None
        elif mask is None:
            yield block, slice(0, tokens), None
        elif has_bounds(mask) and not mask.is_cpu and count >= rows:
            # To look at the bounds would wait for the device.
            yield block, slice(0, tokens), within_bounds(mask, tokens)
        elif not has_bounds(mask):
            yield block, slice(0, tokens), mask if mask.shape[-2] == 1 else mask[..., block, :]
        else:
            bounds = (mask if mask.shape[-2] == 1 else mask[..., block, :]).clamp(0, tokens)
            first, end = bounds[..., 0], bounds[..., 1]
            filled = first < end
            if not bool(filled.any()):
                yield block, None, None
                continue
            low, high = int(first[filled].min()), int(end[filled].max())
            is_full = bool((first == low).all()) and bool((end == high).all())
            yield block, slice(low, high), None if is_full else within_bounds(bounds - low, high - low)


def _attend_by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float, repeats: Sequence[int]
) -> torch.Tensor:
    """Return `attend` with bounds, without a mask of all rows by all keys."""
    y = q.new_zeros((*q.shape[:3], v.shape[3]))
    for block, keys, allowed in row_blocks(q, k, bounds):
        if keys is not None:
            y[:, :, block] = attend(q[:, :, block], k[:, :, keys], v[:, :, keys], allowed, scale, repeats)
    return y


NO_NORMALIZERS = 0, 0
"""The arguments of the kernel for normalizers that are not wanted."""
_LEAST_SCORES = 1 << 15
"""Scores from which a native kernel is worth its compilation, where it is not part of a recorded step."""


def _attend_natively(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    repeats: Sequence[int], causal: bool,
) -> torch.Tensor | None:  # fmt: skip
    """Return the attention of all rows of a sequence to each other by the native kernel; None if it cannot be.

    Also of a part of the rows to the keys between their bounds.
    """
    (batch, heads, rows, _), tokens = q.shape, k.shape[2]
    found, is_part = recording(), rows > 1 and mask is not None and has_bounds(mask)
    is_small = found is None and batch * heads * rows * tokens < _LEAST_SCORES
    if not q.is_cpu or is_small or not (rows == tokens or is_part):
        return None
    of_heads = tuple(repeats) or equal_repeats(heads, k.shape[1])
    kernel = _kernel_for_batch(q, k, v, of_heads)
    if kernel is None:
        return None
    if mask is None:
        numbers = _limits_of_all(batch, rows, causal)
    elif is_causal(mask, rows, rows):
        numbers = _limits_of_all(batch, rows, True)
    elif has_bounds(mask):
        if not are_proper_bounds(mask, tokens):
            return None
        numbers = array("q", mask.expand(batch, rows, 2).contiguous().numpy().tobytes())
    elif (limits := _limits_by_batch(mask, batch, rows, rows, causal)) is not None:
        numbers = array("q", limits)
    else:
        return None
    y = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    arguments, kept = _arguments_for_batch(q, k, v, y, of_heads, numbers, scale)
    if found is not None:
        found.keep(*kept)
    kernel(*arguments)
    return y


def attend_with_normalizers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor | None, scale: float,
    repeats: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Return `attention_parts.attend_part` by the native kernel; None if it cannot be."""
    (batch, heads, rows, _), tokens = q.shape, k.shape[2]
    if not q.is_cpu or batch * heads * rows * tokens < _LEAST_SCORES or 0 in (q.shape[3], v.shape[3]):
        return None
    import torch

    if batch > 1 and any(_rows_of_batch(x) is None for x in (q, k, v)):
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in (slice(i, i + 1) for i in range(batch)):
            of_one = bounds if bounds is None or bounds.dim() < 3 or len(bounds) < batch else bounds[one]
            part = attend_with_normalizers(q[one], k[one], v[one], of_one, scale, repeats)
            if part is None:
                return None
            parts.append(part)
        ys, of_ys = zip(*parts, strict=True)
        return torch.cat(ys), torch.cat(of_ys)
    of_heads = tuple(repeats) or equal_repeats(heads, k.shape[1])
    if (bounds is not None and not has_bounds(bounds)) or not (kernel := _kernel_for_batch(q, k, v, of_heads)):
        return None
    limits = torch.tensor([0, tokens]) if bounds is None else bounds.clamp(0, tokens)
    numbers = array("q", limits.expand(batch, rows, 2).contiguous().numpy().tobytes())
    y = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    of_rows = torch.empty(heads, batch, rows, dtype=torch.float32)
    arguments, _kept = _arguments_for_batch(q, k, v, y, of_heads, numbers, scale, of_rows)
    kernel(*arguments)
    return y, of_rows.transpose(0, 1).unsqueeze(3)


def are_proper_bounds(bounds: torch.Tensor, tokens: int) -> bool:
    """Return whether bounds, as of `attend`, let each row attend to a key, and to none that there is not."""
    first, end = bounds[..., 0], bounds[..., 1]
    return bool(((first >= 0) & (first < end) & (end <= tokens)).all())


@lru_cache(maxsize=64)
def _limits_of_all(batch: int, rows: int, causal: bool) -> array[int]:
    """Return `_limits_by_batch` without a mask."""
    return array("q", _limits_by_batch(None, batch, rows, rows, causal) or ())


def _kernel_for_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, repeats: tuple[int, ...]) -> Kernel | None:
    """Return the native kernel for tensors (batch, heads, rows, width) as one sequence; None if there is none."""
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1 or any(_rows_of_batch(x) is None for x in (q, k, v)):
        return None
    return kernel_for(q, k, v, repeats, appends=False)


def _arguments_for_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, repeats: tuple[int, ...],
    limits: array[int], scale: float, normalizers: torch.Tensor | None = None,
) -> tuple[list[float], tuple[array[int], ...]]:  # fmt: skip
    """Return the arguments of `_kernel_for_batch`, and the arrays that they refer to, of which `limits` is one.

    The logarithms of normalizers are written to `normalizers`, (heads, batch, rows).
    """
    import torch

    batch, rows, tokens, most = q.shape[0], q.shape[2], k.shape[2], rows_of_block(repeats)
    # Requests without earlier positions, whose caches are not used.
    caches = array("q", [n for i in range(batch) for x in (k, v) for n in (x[i].data_ptr(), *x.stride()[1:3])])
    blocks = array("q")
    for i, row in ((i, row) for i in range(batch) for row in range(0, rows, most)):
        blocks.extend((i, i * rows + row, min(most, rows - row), i * tokens, 0))
    parts = [part for x in (q, k, v, y) if (part := _rows_of_batch(x)) is not None]
    wanted = NO_NORMALIZERS if normalizers is None else (normalizers.data_ptr(), batch * rows)
    arguments: list[float] = [
        caches.buffer_info()[0], blocks.buffer_info()[0], len(blocks) // NUMBERS_OF_BLOCK, limits.buffer_info()[0],
        *kernel_places(*parts), *wanted, scale, torch.get_num_threads(),
    ]  # fmt: skip
    return arguments, (caches, blocks, limits)


def _rows_of_batch(x: torch.Tensor) -> torch.Tensor | None:
    """Return (batch, heads, rows, width) as one of (1, heads, batch * rows, width); None if that has no strides."""
    batch, heads, rows, width = x.shape
    if batch > 1 and x.stride(0) != rows * x.stride(2):
        return None
    return x.as_strided((1, heads, batch * rows, width), (0, *x.stride()[1:]))


def _limits_by_batch(mask: torch.Tensor | None, batch: int, rows: int, tokens: int, causal: bool) -> list[int] | None:
    """Return the first position that each row of a batch attends to, and the one after the last, as `limits_of`."""
    import torch

    if mask is None:
        return [n for row in range(rows) for n in (0, row + 1 if causal else tokens)] * batch
    if causal or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4 or (mask.dim() > 2 and mask.shape[-3] != 1):
        return None
    of_all = mask.reshape(-1, *mask.shape[-2:]).expand(batch, rows, tokens)
    return _limits_of_rows(of_all.reshape(-1, tokens))


def load_kernel(
    repeats: tuple[int, ...], width: int, value_width: int, dtype: str, appends: bool = True
) -> Kernel | None:
    """Return the native kernel for keys of which head `i` has `repeats[i]` query heads, compiled if need be.

    None if there is no kernel.
    """
    if dtype not in STORED:
        return None
    kernel = attend_requests(repeats, width, value_width, dtype, True, appends) if dtype == "bfloat16" else None
    return kernel or attend_requests(repeats, width, value_width, dtype, False, appends)


def kernel_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, repeats: tuple[int, ...], appends: bool = True
) -> Kernel | None:
    """Return the native kernel for these tensors, (1, heads, rows, width), as `load_kernel`; None if there is none."""
    dtype = stored_name(q.dtype) if q.is_cpu and q.dtype == k.dtype == v.dtype else None
    return load_kernel(repeats, k.shape[3], v.shape[3], dtype, appends) if dtype and repeats else None


def kernel_places(*tensors: torch.Tensor) -> list[int]:
    """Return the arguments for tensors (1, heads, rows, width): of each its address, and strides by head and row."""
    return [number for x in tensors for number in (x.data_ptr(), *x.stride()[1:3])]


def equal_repeats(heads: int, groups: int) -> tuple[int, ...]:
    """Return the numbers of query heads for each of `groups` heads of keys, which `heads` query heads share equally."""
    return (heads // groups,) * groups if groups else ()


class Cache(NamedTuple):
    """A growing state as keys or values: its name, the dim that grows, and its view (1, heads, tokens, width).

    The view is of `shape`, -1 along the tokens, with its dims permuted by `axes`; both are empty where they are those
    of the state.
    """

    state: str
    axis: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return the view of some tokens."""
        x = x.reshape(self.shape) if self.shape else x
        return x.permute(self.axes) if self.axes else x

    def place(self, request: Request) -> bytes:
        """Return the address of a request's buffer, and its strides by head and by token, as three int64."""
        places = request.states.places
        if self.state not in places:
            x = self.view(request.states[self.state])
            places[self.state] = struct.pack("=3q", x.data_ptr(), x.stride(1), x.stride(2))
        return places[self.state]


CacheArguments: TypeAlias = "tuple[str, int, tuple[int, ...], tuple[int, ...]]"
View: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"


def attend_states(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor,
    mask: torch.Tensor | None, scale: float, views: tuple[View, View], repeats: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the attention of queries to states with new elements, and these states.

    `views` are the arguments of a `Cache` after its name; others are as for `attend`.
    """
    import torch

    caches = [Cache("", *view) for view in views]
    all_k, all_v = (torch.cat(pair, cache.axis) for pair, cache in zip(((past_k, k), (past_v, v)), caches, strict=True))
    keys, values = (cache.view(x) for cache, x in zip(caches, (all_k, all_v), strict=True))
    return attend(q, keys, values, mask, scale, repeats), all_k, all_v


class RequestsAttention:
    """The attention of the `requests` of a step, layer by layer; they may be `recorded_requests.RecordedRequests`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._attend_recorded: Any = getattr(requests, "attend", None)
        self._requests: Sequence[Request] = getattr(requests, "current", requests)
        self._plans: dict[object, _Plan] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[torch.Tensor | None] | int | None,
        scale: float, caches: tuple[CacheArguments, CacheArguments], repeats: tuple[int, ...] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Append new keys and values to the caches of each request, and return the attention of its queries to them.

        `q` is (1, h, rows, d), with the rows of all requests, and so is the result; `k` and `v` are new elements of the
        states, with those of all requests. `masks` has that of each request, None for one that allows everything, or is
        the number of their masks among their `sized` values, and `caches` are those of keys and of values. `repeats`
        are as for `attend`.
        """
        import torch

        if self._attend_recorded is not None:
            found: torch.Tensor | None = self._attend_recorded(q, k, v, masks, scale, caches, repeats)
            if found is not None:
                return found
        keys, values = (Cache(*cache) for cache in caches)
        new_k, new_v = keys.view(k), values.view(v)
        width, value_width = new_k.shape[3], new_v.shape[3]
        of_heads = repeats or equal_repeats(q.shape[1], new_k.shape[1])
        y = q.new_empty(1, q.shape[2], q.shape[1], value_width).transpose(1, 2)
        if isinstance(masks, int):
            masks = [request.sized[masks] for request in self._requests]
        masks = masks or [None] * len(self._requests)
        key = (*map(id, masks), of_heads, width, value_width, q.dtype, k.dtype, v.dtype)
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = _plan(self._requests, masks, q, new_k, new_v, of_heads)
        if plan.kernel is not None:
            if not q.stride(3) == new_k.stride(3) == new_v.stride(3) == 1:
                q, new_k, new_v = q.contiguous(), new_k.contiguous(), new_v.contiguous()
            places = array("b", b"".join([cache.place(r) for r in plan.requests for cache in (keys, values)]))
            plan.kernel(
                places.buffer_info()[0], plan.blocks.buffer_info()[0], len(plan.blocks) // NUMBERS_OF_BLOCK,
                plan.limits.buffer_info()[0], *kernel_places(q, new_k, new_v, y), *NO_NORMALIZERS, scale,
                torch.get_num_threads(),
            )  # fmt: skip
        for number, row in plan.others:
            request = self._requests[number]
            past, new = request.past, request.new
            all_k, all_v = (
                cache.view(extend(request.states[cache.state], past, x.narrow(cache.axis, row, new), cache.axis))
                for cache, x in ((keys, k), (values, v))
            )
            part = attend(q.narrow(2, row, new), all_k, all_v, masks[number], scale, repeats)
            y.narrow(2, row, new).copy_(part)
        return y


@dataclass
class _Plan:
    """How requests attend in layers with the same `masks`: those that the native kernel takes, and the `others`.

    `blocks` and `limits` are arguments of the kernel; `others` have their numbers and first rows.
    """

    masks: Sequence[torch.Tensor | None]
    kernel: Kernel | None
    requests: list[Request]
    blocks: array[int]
    limits: array[int]
    others: list[tuple[int, int]]


def _plan(
    requests: Sequence[Request], masks: Sequence[torch.Tensor | None], q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, repeats: tuple[int, ...],
) -> _Plan:  # fmt: skip
    kernel = kernel_for(q, k, v, repeats)
    plan, start, most = _Plan(masks, kernel, [], array("q"), array("q"), []), 0, rows_of_block(repeats)
    for number, (request, mask) in enumerate(zip(requests, masks, strict=True)):
        limits = limits_of(request, mask) if kernel else None
        if limits is None:
            plan.others.append((number, start))
            plan.limits.extend([0] * (2 * request.new))
        else:
            for row in range(0, request.new, most):
                rows = min(most, request.new - row)
                plan.blocks.extend((len(plan.requests), start + row, rows, start, request.past))
            plan.requests.append(request)
            plan.limits.extend(limits)
        start += request.new
    plan.kernel = kernel if plan.requests else None
    return plan


def limits_of(request: Request, mask: torch.Tensor | None) -> list[int] | None:
    """Return the first position that each row attends to, and the one after the last; None if it leaves some out.

    The mask is a boolean one, or has the bounds of `attend`.
    """
    import torch

    tokens = request.past + request.new
    if mask is None:
        return [0, tokens] * request.new
    if has_bounds(mask):
        bounds: list[int] = mask.flatten().tolist()
        firsts, ends = bounds[::2], bounds[1::2]
        is_proper = all(0 <= first < end <= tokens for first, end in zip(firsts, ends, strict=True))
        return bounds * (request.new // len(ends)) if is_proper else None
    if mask.dtype != torch.bool or mask.dim() < 2 or mask.shape[-1] != tokens or mask.numel() > request.new * tokens:
        return None
    found = _limits_of_rows(mask.reshape(-1, tokens))
    return None if found is None else found * (2 * request.new // len(found))


def bounds_of_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the bounds (s, 2) of a boolean mask (..., s, t), as for `attend`; None for another one."""
    import torch

    rows = mask.reshape(-1, *mask.shape[-2:])
    if 0 in mask.shape or not bool((rows == rows[:1]).all()):
        return None
    found = _limits_of_rows(rows[0])
    return None if found is None else torch.tensor(found).view(-1, 2)


def _limits_of_rows(mask: torch.Tensor) -> list[int] | None:
    """Return the first position that is true in each row, and the one after the last; None if it leaves some out."""
    import torch

    rows, tokens = mask.byte(), mask.shape[1]
    first, last = rows.argmax(1), tokens - rows.flip(1).argmax(1)
    if not bool(((last - first == rows.sum(1)) & rows.any(1)).all()):
        return None
    found: list[int] = torch.stack([first, last], 1).flatten().tolist()
    return found
