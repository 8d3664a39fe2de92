"""A small run of each native kernel against torch: what a kernel must pass on a processor before it is used there."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from distir_relax.kernels.native.attention import attend_requests
from distir_relax.kernels.native.attention_gradient import attention_grad, gradient_scratch
from distir_relax.kernels.native.call_list import run_calls
from distir_relax.kernels.native.elementwise import (
    GELU,
    GELU_TANH_GRAD,
    SILU,
    elementwise,
    times_next,
)
from distir_relax.kernels.native.layer_norm import layer_norm
from distir_relax.kernels.native.load import Kernel, Pairs, Trial
from distir_relax.kernels.native.norm_gradients import norm_grad, norm_weight_grad
from distir_relax.kernels.native.panel_product import PANEL as PRODUCT_PANEL
from distir_relax.kernels.native.panel_product import panel_product
from distir_relax.kernels.native.quantized_product import GROUP, PANEL, quantized_product, record_bytes, scratch_bytes
from distir_relax.kernels.native.rms_norm import rms_norm
from distir_relax.kernels.native.rotary import rotary
from distir_relax.kernels.native.script import LANES
from distir_relax.kernels.native.shared_sum import AREA, SMALL, shared_sum
from distir_relax.kernels.native.updates import adam_step, moving_square
from distir_relax.kernels.native.waits import NUMBERS_OF_WAITS, c_function
from distir_relax.kernels.native.weight_gradient import WEIGHT_GRAD_SCRATCH, weight_grad

if TYPE_CHECKING:
    import torch

_ROWS = 5
_EPSILON = 1e-3


def _drawn(dtype: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    of_dtype = getattr(torch, dtype)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(of_dtype) for shape in shapes]


def _blank(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_full(shape or like.shape, float("nan"))


def _rms_norm(kernel: Kernel, width: int, dtype: str, weight_dtype: str, rounded: bool, parallel: bool) -> Pairs:
    (x,), (weight,) = _drawn(dtype, (_ROWS, width)), _drawn(weight_dtype, (width,))
    y = _blank(x)
    kernel(x.data_ptr(), weight.data_ptr(), y.data_ptr(), _ROWS, _EPSILON, 1 + parallel)
    normal = x.float() / (x.float().square().mean(1, keepdim=True) + _EPSILON).sqrt()
    yield y, (normal.to(x.dtype) if rounded else normal).float() * weight.float()


def _layer_norm(kernel: Kernel, width: int, dtype: str, weight_dtype: str) -> Pairs:
    (x,), (weight, bias) = _drawn(dtype, (_ROWS, width)), _drawn(weight_dtype, (width,), (width,))
    y = _blank(x)
    places = [t.data_ptr() for t in (x, weight, bias, y)]
    kernel(*places, _ROWS, _EPSILON)
    normal = (x.float() - x.float().mean(1, keepdim=True)) / (x.float().var(1, False, keepdim=True) + _EPSILON).sqrt()
    yield y, normal * weight.float() + bias.float()


def _norm_grads(width: int, dtype: str, weight_dtype: str, is_centred: bool) -> list[torch.Tensor]:
    """Return rows, weight, gradient of the norm, and the gradients of rows, weight and bias by torch."""
    import torch
    from torch.nn import functional as F

    (x, g), (weight,) = _drawn(dtype, (_ROWS, width), (_ROWS, width)), _drawn(weight_dtype, (width,))
    wide = [t.double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    norm = (
        F.layer_norm(wide[0], (width,), wide[1], wide[2], _EPSILON)
        if is_centred
        else F.rms_norm(wide[0], (width,), wide[1], _EPSILON)
    )
    grads = torch.autograd.grad(norm, wide, g.double(), allow_unused=True)
    return [x, weight, g, *(torch.zeros_like(weight) if grad is None else grad for grad in grads)]


def _norm_grad(kernel: Kernel, width: int, dtype: str, weight_dtype: str, is_centred: bool, parallel: bool) -> Pairs:
    x, weight, g, expected, _, _ = _norm_grads(width, dtype, weight_dtype, is_centred)
    y = _blank(x)
    kernel(*(t.data_ptr() for t in (x, weight, g, y)), _ROWS, _EPSILON, 1 + parallel)
    yield y, expected


def _norm_weight_grad(
    kernel: Kernel, width: int, dtype: str, weight_dtype: str, is_centred: bool, parallel: bool
) -> Pairs:
    x, weight, g, _, *expected = _norm_grads(width, dtype, weight_dtype, is_centred)
    results = _blank(weight), _blank(weight)
    sums = _blank(expected[0].float(), 2, 2, width)
    places = [t.data_ptr() for t in (x, g, *results, sums)]
    kernel(*places, _ROWS, _EPSILON, 1 + parallel)
    yield from zip(results[: 1 + is_centred], expected, strict=False)


def _rotary(kernel: Kernel, width: int, dtype: str, parallel: bool) -> Pairs:
    import torch

    heads, half = 3, width // 2
    x, cos, sin = _drawn(dtype, (_ROWS, heads, width), (_ROWS, width), (_ROWS, width))
    y = _blank(x)
    places = [t.data_ptr() for t in (x, cos, sin, y)]
    kernel(*places, _ROWS, heads, heads * width, width, width, heads * width, width, 1 + parallel)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1).float()
    yield y, x.float() * cos[:, None].float() + turned * sin[:, None].float()


class _Script:
    """The functions of TVM's script that expressions use, as torch's."""

    float32 = float

    @staticmethod
    def Select(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        import torch

        return torch.where(condition, x, y)


def _elementwise(kernel: Kernel, expression: str, operands: int, dtype: str, parallel: bool) -> Pairs:
    import torch

    columns = 2 * LANES + 3
    xs = _drawn(dtype, *[(_ROWS, columns)] * operands)
    y = _blank(xs[0])
    places = [number for x in (*xs, y) for number in (x.data_ptr(), columns)]
    kernel(*places, _ROWS, columns, 1 + parallel)
    names = {name: getattr(torch, name) for name in ("exp", "tanh", "erf", "sigmoid")}
    operands_of_name = {f"x{number}": x.float() for number, x in enumerate(xs)}
    yield y, eval(expression.format(*operands_of_name), {"T": _Script, "rounded": _same, **names, **operands_of_name})


def _same(x: Any) -> Any:
    return x


def _panel_product(kernel: Kernel, dtype: str, biased: bool, parallel: bool, dots: bool) -> Pairs:
    columns, inner = 2 * PRODUCT_PANEL, 34
    weight, bias, x = _drawn(dtype, (columns, inner), (columns,), (7, inner))
    pair = 2 if dtype == "bfloat16" else 1
    packed = weight.view(2, PRODUCT_PANEL, inner // pair, pair).permute(0, 2, 1, 3).contiguous()
    y = _blank(x, 7, columns)
    places = [t.data_ptr() for t in (x, packed, bias, y)]
    kernel(*places, 7, columns, inner, inner, 1 + parallel)
    yield y, x.float() @ weight.float().t() + (bias.float() if biased else 0.0)


def _quantized_product(
    kernel: Kernel, dtype: str, bits: int, grouped: bool, parallel: bool, instruction: bool
) -> Pairs:
    import torch

    columns, inner, rows, generator = 2 * PANEL, 2 * GROUP, 7, torch.Generator().manual_seed(0)
    (x,), (bias,) = _drawn(dtype, (rows, inner)), _drawn("float32", (columns,))
    x[:] = x.clamp(-1, 1)
    groups = inner // GROUP
    values = torch.randint(0, 1 << bits, (columns, groups, GROUP), generator=generator, dtype=torch.uint8)
    scales = torch.rand(columns, groups, 1, generator=generator, dtype=torch.float32).half() / 64
    minimums = -8 * scales
    of_columns = scales[:, 0].float()
    factors = scales.float() if grouped else of_columns[:, None]
    weight = values.float() * factors + minimums.float() if bits == 4 else (values.float() - 128) * factors
    packed_values = values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4 if bits == 4 else values
    words = packed_values.view(2, PANEL, groups, -1, 4).permute(0, 2, 3, 1, 4)
    panels = words.flatten(2)
    if grouped:
        numbers = [t.view(2, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8) for t in (scales, minimums)]
        panels = torch.cat([panels, *numbers[: 2 if bits == 4 else 1]], 2)
        assert panels.shape[2] == record_bytes(bits)
    panels = panels.contiguous()
    y = _blank(x, rows, columns)
    scratch = torch.zeros(scratch_bytes(rows, inner, grouped), dtype=torch.uint8)
    places = panels.data_ptr(), of_columns.data_ptr(), bias.data_ptr(), columns, inner
    kernel(*places, x.data_ptr(), y.data_ptr(), scratch.data_ptr(), rows, 1 + parallel)
    # The inputs are rounded to 8 bits, each group or row of them with a scale of its own.
    parts = x.float().view(rows, groups, GROUP) if grouped else x.float()[:, None]
    step = parts.abs().amax(2, keepdim=True) / 127
    rounded = ((parts / step).round() * step).view(rows, inner)
    yield y, rounded @ weight.reshape(columns, inner).t() + bias


def _attend_requests(
    kernel: Kernel, repeats: tuple[int, ...], width: int, value_width: int, dtype: str, dots: bool, appends: bool = True
) -> Pairs:
    """One request with earlier positions, if new ones are appended to them."""
    import torch

    rows, past, groups, heads = 3, 70 * appends, len(repeats), sum(repeats)
    q, k, v = _drawn(dtype, (heads, rows, width), (groups, rows, width), (groups, rows, value_width))
    old_k, old_v = _drawn(dtype, (groups, past + rows, width), (groups, past + rows, value_width))
    if not appends:
        old_k, old_v = k, v
    y = _blank(q, heads, rows, value_width)
    cache = [n for t in (old_k, old_v) for n in (t.data_ptr(), t.stride(0), t.stride(1))]
    limits = [n for row in range(rows) for n in (0, past + row + 1)]
    numbers = [struct.pack(f"={len(n)}q", *n) for n in (cache, [0, 0, rows, 0, past], limits)]
    buffers = [torch.frombuffer(bytearray(n), dtype=torch.uint8) for n in numbers]
    places = [n for t in (q, k, v, y) for n in (t.data_ptr(), t.stride(0), t.stride(1))]
    kernel(buffers[0].data_ptr(), buffers[1].data_ptr(), 1, buffers[2].data_ptr(), *places, 0.25, 2)
    if appends:
        yield old_k[:, past:], k.float()
        yield old_v[:, past:], v.float()
    times = torch.tensor(repeats)
    keys, values = (t.float().repeat_interleave(times, 0) for t in (old_k, old_v))
    scores = q.float() @ keys.mT * 0.25
    allowed = torch.arange(past + rows) <= past + torch.arange(rows)[:, None]
    yield y, scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values


def _attention_grad(kernel: Kernel, width: int, value_width: int, dtype: str, masked: bool, parallel: bool) -> Pairs:
    import torch

    heads, rows = 2, LANES + 3
    shapes = [(heads, rows, size) for size in (width, width, value_width, value_width)]
    tensors = _drawn(dtype, *shapes)
    *wide, g = (t.double() for t in tensors)
    q, k, v = (t.requires_grad_() for t in wide)
    allowed = torch.ones(rows, rows, dtype=torch.bool).tril()
    places_of_mask = list[int]()
    if masked:
        allowed[:, 1::7] = False
        lanes = torch.full((rows, 2 * LANES), -1.0, dtype=torch.float32)
        lanes[:, :rows] = allowed.t().float() - 0.5
        places_of_mask = [lanes.data_ptr(), 0, 0]
    scores = (q @ k.mT * 0.25).masked_fill(~allowed, float("-inf"))
    expected = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), g)
    results = [_blank(t) for t in tensors[:3]]
    places = [n for t in (*tensors, *results) for n in (t.data_ptr(), 0, t.stride(0), t.stride(1))]
    scratch = torch.zeros(2, gradient_scratch(rows, rows, width, value_width), dtype=torch.float32)
    kernel(*places, *places_of_mask, scratch.data_ptr(), heads, heads, rows, rows, 0, 0.25, 1 + parallel)
    yield from zip(results, expected, strict=True)


def _weight_grad(kernel: Kernel, parallel: bool) -> Pairs:
    import torch

    m, n, k = 19, 11, 2 * LANES + 5
    a, b = _drawn("float32", (m, n), (m, k))
    y, scratch = _blank(a, n, k), torch.zeros(2, WEIGHT_GRAD_SCRATCH, dtype=torch.float32)
    kernel(*(t.data_ptr() for t in (a, b, y, scratch)), m, n, k, 1 + parallel)
    yield y, a.t() @ b


def _adam_step(kernel: Kernel, parallel: bool) -> Pairs:
    w, m, v = _drawn("float32", *[(2 * LANES + 3,)] * 3)
    v = v.square()
    expected = w * 0.9 - 0.1 * (m / (v.sqrt() + 0.01))
    kernel(*(t.data_ptr() for t in (w, m, v)), w.numel(), 0.9, 0.1, 0.01, 1 + parallel)
    yield w, expected


def _moving_square(kernel: Kernel, parallel: bool) -> Pairs:
    v, x = _drawn("float32", *[(2 * LANES + 3,)] * 2)
    expected = v * 0.9 + x * x * 0.1
    kernel(v.data_ptr(), x.data_ptr(), v.numel(), 0.9, 0.1, 1 + parallel)
    yield v, expected


def _shared_sum(kernel: Kernel, dtype: str, ranks: int) -> Pairs:
    """Rank 0 of `ranks`, whose peers have written zeros to all places, and set their flags."""
    import torch

    # A peer has two flags: for its operand, and 64 bytes later for its part of the result.
    memory = torch.zeros(ranks * AREA // 8, dtype=torch.int64)
    areas = [memory.data_ptr() + number * AREA for number in range(ranks)]
    memory.view(ranks, -1)[1:, (0, 8)] = 1 << 40
    waits, call = torch.zeros(NUMBERS_OF_WAITS, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for count in (2 * LANES + 3, SMALL + 3):
        (x,) = _drawn(dtype, (count,))
        y = _blank(x)
        places = x.data_ptr(), y.data_ptr(), count, 0, call.data_ptr(), 0, waits.data_ptr()
        kernel(*places, c_function("sched_yield"), c_function("clock_gettime"), *areas)
        # Of a large tensor, the other ranks would have written their parts.
        own = count if count <= SMALL // x.itemsize else -(-count // (ranks * LANES)) * LANES
        yield y[:own], x[:own].float()


def _run_calls(kernel: Kernel) -> Pairs:
    import torch

    status = torch.full((1,), -1, dtype=torch.int64)
    kernel(0, 0, 0, status.data_ptr())
    yield status.float(), torch.zeros(1, dtype=torch.float32)


_DTYPES = ("float32", "bfloat16")
TRIALS = (
    Trial(rms_norm, _rms_norm, [(67, "float32", "float32", False, False), (67, "bfloat16", "bfloat16", True, True)]),
    Trial(layer_norm, _layer_norm, [(67, dtype, dtype) for dtype in _DTYPES]),
    Trial(norm_grad, _norm_grad, [(67, "float32", "float32", True, False), (67, "bfloat16", "bfloat16", False, True)]),
    Trial(
        norm_weight_grad, _norm_weight_grad,
        [(67, "float32", "float32", True, False), (67, "bfloat16", "bfloat16", False, True)],
    ),
    Trial(rotary, _rotary, [(66, "float32", False), (66, "bfloat16", True)]),
    Trial(
        elementwise, _elementwise,
        [(times_next(SILU), 2, "float32", False), (GELU, 1, "bfloat16", True), (GELU_TANH_GRAD, 2, "float32", True)],
    ),
    Trial(
        panel_product, _panel_product,
        [("float32", True, False, False), ("bfloat16", False, True, False), ("bfloat16", True, True, True)],
    ),
    Trial(
        quantized_product, _quantized_product,
        [("float32", 8, False, False, False), ("bfloat16", 4, True, True, True), ("float32", 8, True, True, True)],
    ),
    Trial(
        attend_requests, _attend_requests,
        [((2, 2), 20, 12, "float32", False, True), ((3, 1), 24, 24, "bfloat16", False, False),
         ((2, 2), 24, 24, "bfloat16", True, True)],
    ),
    Trial(attention_grad, _attention_grad, [(20, 12, "float32", False, False), (24, 24, "bfloat16", True, True)]),
    Trial(weight_grad, _weight_grad, [(False,), (True,)]),
    Trial(adam_step, _adam_step, [(False,), (True,)]),
    Trial(moving_square, _moving_square, [(False,), (True,)]),
    Trial(shared_sum, _shared_sum, [("float32", 2), ("bfloat16", 3)]),
    Trial(run_calls, _run_calls, [()]),
)  # fmt: skip
"""The trials of all kernels."""

for _trial in TRIALS:
    _trial.kernel.trial = _trial
