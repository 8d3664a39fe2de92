"""A small run of each native kernel against torch: what a kernel must pass on a processor before it is used there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from distir_relax.kernels.native.kernels import (
    AREA,
    GROUP,
    LANES,
    NUMBERS_OF_BLOCK,
    NUMBERS_OF_WAITS,
    PANEL,
    QUANTIZED_PANEL,
    SMALL,
    WEIGHT_GRAD_SCRATCH,
    adam_step,
    attend_requests,
    attention_grad,
    elementwise,
    gradient_scratch,
    layer_norm,
    moving_square,
    norm_grad,
    norm_weight_grad,
    panel_product,
    quantized_product,
    record_bytes,
    rms_norm,
    rotary,
    rows_of_block,
    run_calls,
    scratch_bytes,
    shared_sum,
    use_openmp,
    weight_grad,
)
from distir_relax.kernels.native.load import Kernel, Pairs, Trial
from distir_relax.kernels.native.threads import openmp_functions

if TYPE_CHECKING:
    import torch

_ROWS, _WIDTH, _THREADS = 5, 67, 2
_EPSILON = 1e-3


def _drawn(dtype: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    of_dtype = getattr(torch, dtype)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(of_dtype) for shape in shapes]


def _blank(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_full(shape or like.shape, float("nan"))


def _rms_norm(kernel: Kernel, dtype: str, weight_dtype: str, rounded: bool) -> Pairs:
    (x,), (weight,) = _drawn(dtype, (_ROWS, _WIDTH)), _drawn(weight_dtype, (_WIDTH,))
    y = _blank(x)
    kernel(x.data_ptr(), weight.data_ptr(), y.data_ptr(), _ROWS, _WIDTH, _EPSILON, _THREADS)
    normal = x.float() / (x.float().square().mean(1, keepdim=True) + _EPSILON).sqrt()
    yield y, (normal.to(x.dtype) if rounded else normal).float() * weight.float()


def _layer_norm(kernel: Kernel, dtype: str, weight_dtype: str) -> Pairs:
    (x,), (weight, bias) = _drawn(dtype, (_ROWS, _WIDTH)), _drawn(weight_dtype, (_WIDTH,), (_WIDTH,))
    y = _blank(x)
    places = [t.data_ptr() for t in (x, weight, bias, y)]
    kernel(*places, _ROWS, _WIDTH, _EPSILON)
    normal = (x.float() - x.float().mean(1, keepdim=True)) / (x.float().var(1, False, keepdim=True) + _EPSILON).sqrt()
    yield y, normal * weight.float() + bias.float()


def _norm_grads(dtype: str, weight_dtype: str, is_centred: bool) -> list[torch.Tensor]:
    """Return rows, weight, gradient of the norm, and the gradients of rows, weight and bias by torch."""
    import torch
    from torch.nn import functional as F

    (x, g), (weight,) = _drawn(dtype, (_ROWS, _WIDTH), (_ROWS, _WIDTH)), _drawn(weight_dtype, (_WIDTH,))
    wide = [t.double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    norm = (
        F.layer_norm(wide[0], (_WIDTH,), wide[1], wide[2], _EPSILON)
        if is_centred
        else F.rms_norm(wide[0], (_WIDTH,), wide[1], _EPSILON)
    )
    grads = torch.autograd.grad(norm, wide, g.double(), allow_unused=True)
    return [x, weight, g, *(torch.zeros_like(weight) if grad is None else grad for grad in grads)]


def _norm_grad(kernel: Kernel, dtype: str, weight_dtype: str, is_centred: bool) -> Pairs:
    x, weight, g, expected, _, _ = _norm_grads(dtype, weight_dtype, is_centred)
    y = _blank(x)
    kernel(*(t.data_ptr() for t in (x, weight, g, y)), _ROWS, _WIDTH, _EPSILON, _THREADS)
    yield y, expected


def _norm_weight_grad(kernel: Kernel, dtype: str, weight_dtype: str, is_centred: bool) -> Pairs:
    x, weight, g, _, *expected = _norm_grads(dtype, weight_dtype, is_centred)
    results = _blank(weight), _blank(weight)
    sums = _blank(expected[0].float(), _THREADS, 2, _WIDTH)
    places = [t.data_ptr() for t in (x, g, *results, sums)]
    kernel(*places, _ROWS, _WIDTH, _EPSILON, _THREADS)
    yield from zip(results[: 1 + is_centred], expected, strict=False)


def _rotary(kernel: Kernel, dtype: str) -> Pairs:
    import torch

    heads, width, half = 3, 66, 33
    x, cos, sin = _drawn(dtype, (_ROWS, heads, width), (_ROWS, width), (_ROWS, width))
    y = _blank(x)
    places = [t.data_ptr() for t in (x, cos, sin, y)]
    kernel(*places, _ROWS, heads, width, heads * width, width, width, heads * width, width, _THREADS)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1).float()
    yield y, x.float() * cos[:, None].float() + turned * sin[:, None].float()


def _elementwise(kernel: Kernel, function: str, operands: int, number: int, gated: bool, dtype: str) -> Pairs:
    import torch
    from torch.nn import functional as F

    aten, columns, value = torch.ops.aten, 2 * LANES + 3, -0.75
    x, g = _drawn(dtype, *[(_ROWS, columns)] * 2)
    y = _blank(x)
    places = [
        n
        for place, t in enumerate((x, g))
        for n in ((0, 0) if place in (number, operands) else (t.data_ptr(), columns))
    ]
    kernel(*places, value, y.data_ptr(), columns, _ROWS, columns, _THREADS)
    a, b = (torch.tensor(value) if place == number else t.float() for place, t in enumerate((x, g)))
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "add": lambda: a + b, "subtract": lambda: a - b, "multiply": lambda: a * b, "divide": lambda: a / b,
        "relu": lambda: torch.relu(a), "silu": lambda: F.silu(a), "gelu": lambda: F.gelu(a),
        "gelu_tanh": lambda: F.gelu(a, approximate="tanh"), "silu_grad": lambda: aten.silu_backward.default(b, a),
        "gelu_grad": lambda: aten.gelu_backward.default(b, a),
        "gelu_tanh_grad": lambda: aten.gelu_backward.default(b, a, approximate="tanh"),
    }  # fmt: skip
    expected: torch.Tensor = forms[function]()
    yield y, expected * b if gated else expected


def _panel_product(kernel: Kernel, dtype: str, biased: bool, dots: bool) -> Pairs:
    columns, inner = 2 * PANEL, 34
    weight, bias, x = _drawn(dtype, (columns, inner), (columns,), (7, inner))
    pair = 2 if dtype == "bfloat16" else 1
    packed = weight.view(2, PANEL, inner // pair, pair).permute(0, 2, 1, 3).contiguous()
    y = _blank(x, 7, columns)
    places = [t.data_ptr() for t in (x, packed, bias, y)]
    kernel(*places, 7, columns, inner, inner, _THREADS)
    yield y, x.float() @ weight.float().t() + (bias.float() if biased else 0.0)


def _quantized_product(kernel: Kernel, dtype: str, bits: int, grouped: bool, instruction: bool) -> Pairs:
    import torch

    columns, inner, rows, generator = 2 * QUANTIZED_PANEL, 2 * GROUP, 7, torch.Generator().manual_seed(0)
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
    words = packed_values.view(2, QUANTIZED_PANEL, groups, -1, 4).permute(0, 2, 3, 1, 4)
    panels = words.flatten(2)
    if grouped:
        numbers = [
            t.view(2, QUANTIZED_PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8)
            for t in (scales, minimums)
        ]
        panels = torch.cat([panels, *numbers[: 2 if bits == 4 else 1]], 2)
        assert panels.shape[2] == record_bytes(bits)
    panels = panels.contiguous()
    y = _blank(x, rows, columns)
    scratch = torch.zeros(scratch_bytes(rows, inner, grouped), dtype=torch.uint8)
    places = panels.data_ptr(), of_columns.data_ptr(), bias.data_ptr(), columns, inner
    kernel(*places, x.data_ptr(), y.data_ptr(), scratch.data_ptr(), rows, _THREADS)
    # The inputs are rounded to 8 bits, each group or row of them with a scale of its own.
    parts = x.float().view(rows, groups, GROUP) if grouped else x.float()[:, None]
    step = parts.abs().amax(2, keepdim=True) / 127
    rounded = ((parts / step).round() * step).view(rows, inner)
    yield y, rounded @ weight.reshape(columns, inner).t() + bias


def _attend_requests(
    kernel: Kernel, repeats: tuple[int, ...], width: int, value_width: int, dtype: str, dots: bool, appends: bool
) -> Pairs:
    """One request with earlier positions, if new ones are appended to them."""
    import torch

    rows, past, groups, heads = 3, 70 * appends, len(repeats), sum(repeats)
    q, k, v = _drawn(dtype, (heads, rows, width), (groups, rows, width), (groups, rows, value_width))
    old_k, old_v = _drawn(dtype, (groups, past + rows, width), (groups, past + rows, value_width))
    if not appends:
        old_k, old_v = k, v
    y, normalizers = _blank(q, heads, rows, value_width), torch.zeros(heads, rows, dtype=torch.float32)
    cache = [n for t in (old_k, old_v) for n in (t.data_ptr(), t.stride(0), t.stride(1))]
    limits = [n for row in range(rows) for n in (0, past + row + 1)]
    most = rows_of_block(repeats)
    blocks = [n for row in range(0, rows, most) for n in (0, row, min(most, rows - row), 0, past)]
    numbers = [struct.pack(f"={len(n)}q", *n) for n in (cache, blocks, limits)]
    buffers = [torch.frombuffer(bytearray(n), dtype=torch.uint8) for n in numbers]
    places = [n for t in (q, k, v, y) for n in (t.data_ptr(), t.stride(0), t.stride(1))]
    kernel(
        buffers[0].data_ptr(),
        buffers[1].data_ptr(),
        len(blocks) // NUMBERS_OF_BLOCK,
        buffers[2].data_ptr(),
        *places,
        normalizers.data_ptr(),
        rows,
        0.25,
        2,
    )
    if appends:
        yield old_k[:, past:], k.float()
        yield old_v[:, past:], v.float()
    times = torch.tensor(repeats)
    keys, values = (t.float().repeat_interleave(times, 0) for t in (old_k, old_v))
    scores = q.float() @ keys.mT * 0.25
    allowed = torch.arange(past + rows) <= past + torch.arange(rows)[:, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    yield y, scores.softmax(-1) @ values
    yield normalizers, scores.logsumexp(-1)


def _attention_grad(kernel: Kernel, width: int, value_width: int, dtype: str, masked: bool) -> Pairs:
    import torch

    heads, rows = 2, LANES + 3
    shapes = [(heads, rows, size) for size in (width, width, value_width, value_width)]
    tensors = _drawn(dtype, *shapes)
    *wide, g = (t.double() for t in tensors)
    q, k, v = (t.requires_grad_() for t in wide)
    allowed = torch.ones(rows, rows, dtype=torch.bool).tril()
    places_of_mask = [0, 0, 0]
    if masked:
        allowed[:, 1::7] = False
        lanes = torch.full((rows, 2 * LANES), -1.0, dtype=torch.float32)
        lanes[:, :rows] = allowed.t().float() - 0.5
        places_of_mask = [lanes.data_ptr(), 0, 0]
    scores = (q @ k.mT * 0.25).masked_fill(~allowed, float("-inf"))
    y, normalizers = scores.softmax(-1) @ v, scores.logsumexp(-1).detach().float()
    expected = torch.autograd.grad(y, (q, k, v), g)
    means = (y.detach() * g).sum(-1).float()
    results = [_blank(t) for t in tensors[:3]]
    places = [n for t in (*tensors, *results) for n in (t.data_ptr(), 0, t.stride(0), t.stride(1))]
    scratch = torch.zeros(_THREADS, gradient_scratch(rows, rows, width, value_width), dtype=torch.float32)
    bounds = torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1)], 1)
    addresses = bounds.data_ptr(), scratch.data_ptr()
    for of_rows in ((), (normalizers, means)) if not masked else ((),):
        given = [x.data_ptr() for x in of_rows] or [0, 0]
        kernel(*places, *places_of_mask, *addresses, *given, heads, heads, rows, rows, 0.25, _THREADS)
        yield from zip(results, expected, strict=True)


def _weight_grad(kernel: Kernel) -> Pairs:
    import torch

    m, n, k = 19, 11, 2 * LANES + 5
    a, b = _drawn("float32", (m, n), (m, k))
    y, scratch = _blank(a, n, k), torch.zeros(_THREADS, WEIGHT_GRAD_SCRATCH, dtype=torch.float32)
    kernel(*(t.data_ptr() for t in (a, b, y, scratch)), m, n, k, _THREADS)
    yield y, a.t() @ b


def _adam_step(kernel: Kernel) -> Pairs:
    w, m, v = _drawn("float32", *[(2 * LANES + 3,)] * 3)
    v = v.square()
    expected = w * 0.9 - 0.1 * (m / (v.sqrt() + 0.01))
    kernel(*(t.data_ptr() for t in (w, m, v)), w.numel(), 0.9, 0.1, 0.01, _THREADS)
    yield w, expected


def _moving_square(kernel: Kernel) -> Pairs:
    v, x = _drawn("float32", *[(2 * LANES + 3,)] * 2)
    expected = v * 0.9 + x * x * 0.1
    kernel(v.data_ptr(), x.data_ptr(), v.numel(), 0.9, 0.1, _THREADS)
    yield v, expected


def _shared_sum(kernel: Kernel, dtype: str, ranks: int) -> Pairs:
    """Rank 0 of `ranks`, whose peers have written zeros to all places, and set their flags."""
    import torch

    # A peer has two flags: for its operand, and 64 bytes later for its part of the result.
    memory = torch.zeros(ranks * AREA // 8, dtype=torch.int64)
    areas = torch.arange(ranks) * AREA + memory.data_ptr()
    memory.view(ranks, -1)[1:, (0, 8)] = 1 << 40
    waits, call = torch.zeros(NUMBERS_OF_WAITS, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for count in (2 * LANES + 3, SMALL + 3):
        (x,) = _drawn(dtype, (count,))
        y = _blank(x)
        places = x.data_ptr(), y.data_ptr(), count, 0, call.data_ptr(), 0, waits.data_ptr()
        kernel(*places, areas.data_ptr())
        # Of a large tensor, the other ranks would have written their parts.
        own = count if count <= SMALL // x.itemsize else -(-count // (ranks * LANES)) * LANES
        yield y[:own], x[:own].float()


def _run_calls(kernel: Kernel) -> Pairs:
    import torch

    status = torch.full((1,), -1, dtype=torch.int64)
    kernel(0, 0, 0, status.data_ptr())
    yield status.float(), torch.zeros(1, dtype=torch.float32)


def _use_openmp(kernel: Kernel) -> Pairs:
    """It writes the address of a function, unless torch's threads are not OpenMP's."""
    import torch

    variable = torch.zeros(1, dtype=torch.int64)
    kernel(variable.data_ptr())
    yield (variable != 0).float(), torch.tensor([float(bool(openmp_functions()))])


TRIALS = (
    Trial(rms_norm, _rms_norm, [("float32", "float32", False), ("bfloat16", "bfloat16", True)]),
    Trial(layer_norm, _layer_norm, [("float32", "float32"), ("bfloat16", "bfloat16")]),
    Trial(norm_grad, _norm_grad, [("float32", "float32", True), ("bfloat16", "bfloat16", False)]),
    Trial(norm_weight_grad, _norm_weight_grad, [("float32", "float32", True), ("bfloat16", "bfloat16", False)]),
    Trial(rotary, _rotary, [("float32",), ("bfloat16",)]),
    Trial(
        elementwise, _elementwise,
        [("silu", 2, -1, True, "float32"), ("gelu", 1, -1, False, "bfloat16"), ("subtract", 2, 0, False, "float32"),
         *((f"{name}_grad", 2, -1, False, "float32") for name in ("silu", "gelu", "gelu_tanh")),
         *((name, 2, -1, False, "float32") for name in ("add", "subtract", "multiply", "divide")),
         *((name, 1, -1, False, "float32") for name in ("relu", "gelu_tanh"))],
    ),
    Trial(
        panel_product, _panel_product,
        [("float32", True, False), ("bfloat16", False, False), ("bfloat16", True, True)],
    ),
    Trial(
        quantized_product, _quantized_product,
        [("float32", 8, False, False), ("bfloat16", 4, True, False), ("float32", 8, True, True),
         ("bfloat16", 4, True, True)],
    ),
    Trial(
        attend_requests, _attend_requests,
        [((2, 2), 20, 12, "float32", False, True), ((3, 1), 24, 24, "bfloat16", False, False),
         ((2, 2), 24, 24, "bfloat16", True, True)],
    ),
    Trial(attention_grad, _attention_grad, [(20, 12, "float32", False), (24, 24, "bfloat16", True)]),
    Trial(weight_grad, _weight_grad, [()]),
    Trial(adam_step, _adam_step, [()]),
    Trial(moving_square, _moving_square, [()]),
    Trial(shared_sum, _shared_sum, [("float32", 2), ("bfloat16", 3)]),
    Trial(run_calls, _run_calls, [()]),
    Trial(use_openmp, _use_openmp, [()]),
)  # fmt: skip
"""The trials of all kernels."""

for _trial in TRIALS:
    _trial.kernel.trial = _trial
