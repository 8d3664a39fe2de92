"""Microbenchmarks of a calibration: ops of each kind over a range of sizes, and collectives over a range of payloads.

The sizes are not round, and differ from those of the models that validate a profile: a fit must hold away from its
data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distir_relax.cost.roofline import OpWork, op_work
from distir_relax.ir import TensorType
from distir_relax.kernels.processor import processor_flags
from distir_relax.kernels.quantized.weights import GROUP
from distir_relax.ops import Packed, infer, lookup


@dataclass(frozen=True)
class OpSample:
    """One op on operands of given types. `group` is one of ``products``, ``elementwise``, ``views``, ``rows``,
    ``attention``.

    `weight` is the index of the weight operand, if any. It is `fixed` if the backend may pack it once. If `cold`, the
    weight, or all operands without a weight, are not in a cache. Of attention with `heads_last`, operands are views of
    (batch, rows, heads, width), as models make them; with `cached`, the query is of the last position of a sequence,
    to which keys and values belong. A `recorded` op runs in a list of native calls (`kernels.recording`).
    """

    group: str
    op: str
    operands: tuple[TensorType, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    weight: int | None = None
    fixed: bool = False
    cold: bool = False
    heads_last: bool = False
    recorded: bool = False
    cached: bool = False

    @property
    def uncached(self) -> tuple[bool, ...]:
        """Which operands, followed by results, are in no cache, for `op_seconds`."""
        if not self.cold:
            return ()
        is_in_place = self.weight is None and lookup(self.op).updates
        return (*(self.weight in (None, i) for i in range(len(self.operands))), *(is_in_place for _ in self.results))

    @property
    def results(self) -> tuple[TensorType, ...]:
        """The result types."""
        return infer(self.op, self.operands, self.attrs)

    @property
    def work(self) -> OpWork:
        """The counts of the op for the cost model."""
        entry = lookup(self.op)
        return op_work(
            entry, self.operands, self.attrs, self.results, self.fixed, self.uncached, recorded=self.recorded
        )

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.operands))})"


_RECORDED_BYTES = 130_000
"""Bytes of the results of the largest ops that are measured in a list of native calls."""

QUANTIZED = ("int8", "uint8")
"""The dtypes of values of quantized weights, of 8 and 4 bits, whose products are measured alone."""


def dtypes_of(device: str) -> tuple[str, ...]:
    """Return the dtypes that are measured on a kind of device: on CPUs those of quantized weights, and bfloat16 if
    there are instructions for it."""
    if device != "cpu":
        return ("float32", "float16", "bfloat16")
    has_bfloat16 = bool({"avx512_bf16", "amx_bf16", "bf16"} & processor_flags())
    return ("float32", *(("bfloat16",) if has_bfloat16 else ()), *QUANTIZED)


def scale_of(device: str) -> int:
    """Return the factor of larger sizes for a kind of device."""
    return 1 if device == "cpu" else 6


def op_samples(dtype: str, scale: int) -> list[OpSample]:
    """Return the ops to measure. `scale` multiplies the larger sizes."""
    if dtype in QUANTIZED:
        samples = list(_quantized_products(dtype))
    else:
        samples = [*_products(dtype, scale), *_elementwise(dtype, scale), *_rows(dtype, scale)]
    # GPUs, whose sizes are scaled, have no recorded programs.
    if scale > 1:
        return samples
    decoding = [] if dtype in QUANTIZED else _decoding(dtype)
    return [*samples, *(replace(sample, recorded=True) for sample in samples if _is_recorded(sample)), *decoding]


def _is_recorded(sample: OpSample) -> bool:
    """Whether a sample is measured in a list of native calls, too: one that Python may take a large part of."""
    entry = lookup(sample.op)
    has_kernel = entry.is_native or (sample.fixed and entry.kernel(Packed) is not None)
    is_small = sum(t.bytes for t in sample.results) <= _RECORDED_BYTES and not sample.cold
    return has_kernel and is_small and not sample.attrs.get("masked")


def _decoding(dtype: str) -> Iterator[OpSample]:
    """Return the attention of one new position to those before it."""
    attrs = {"scale": 0.15, "causal": False, "masked": False, "boolean": False}
    for heads, length, width in ((5, 61, 48), (7, 230, 48), (5, 345, 80)):
        q, k = TensorType((1, heads, 1, width), dtype), TensorType((1, heads, length, width), dtype)
        op = "nn.scaled_dot_product_attention"
        yield OpSample("attention", op, (q, k, k), attrs, heads_last=True, recorded=True, cached=True)


def payloads(scale: int) -> tuple[int, ...]:
    """Return the sizes of tensors, in elements, with which collectives are measured."""
    counts = (3, 190, 3_100, 24_000, 49_000, 97_000, 195_000, 390_000, 780_000, 1_550_000)
    return tuple(int(n * (scale if n > 10_000 else 1)) for n in counts)


def _products(dtype: str, scale: int) -> Iterator[OpSample]:
    sides = ((88, 350), (350, 88), (350, 350), (350, 1400), (1400, 350), (700, 700), (1100, 1100), (1400, 1400))
    scaled = [(k * scale, n * scale) for k, n in sides]
    for inner, columns in scaled:
        for rows in (1, 3, 7, 14, 29, 58, 115, 230, 460, 920, *((2300, 5500) if scale > 1 else ())):
            if rows * inner * columns > 2.5e8 * scale**3:
                continue
            x, weight = TensorType((rows, inner), dtype), TensorType((columns, inner), dtype)
            yield OpSample("products, packed", "linear", (x, weight), weight=1, fixed=True)
            is_large = min(inner, columns) > 100 * scale
            if is_large and rows in (1, 7, 14, 29):
                yield OpSample("products, cold", "linear", (x, weight), weight=1, fixed=True, cold=True)
            second = TensorType((inner, columns), dtype)
            yield OpSample("products", "matmul", (x, second), weight=1)
            if is_large and rows in (14, 115):
                yield OpSample("products, cold", "linear", (x, weight), weight=1, cold=True)
                yield OpSample("products, cold", "matmul", (x, second), weight=1, cold=True)
    # In training, whose weights are not packed.
    for inner, columns in scaled[2:]:
        for rows in (3, 14, 58, 230):
            x, weight = TensorType((rows, inner), dtype), TensorType((columns, inner), dtype)
            yield OpSample("products", "linear", (x, weight), weight=1)
            yield OpSample("products", "linear_weight_grad", (TensorType((rows, columns), dtype), x))


def _quantized_products(dtype: str) -> Iterator[OpSample]:
    """Return products of float32 with weights of 8 bits, or of 4, two in a byte of ``uint8``, in groups."""
    numbers = 1 if dtype == "int8" else 2
    for inner, columns in ((96, 352), (352, 96), (352, 1408), (704, 704), (1408, 352), (1408, 1408)):
        groups = inner // GROUP
        values = TensorType((columns, groups, GROUP // numbers), dtype)
        weight = (values, *[TensorType((columns, groups, 1), "float16")] * numbers)
        for rows in (1, 3, 14, 58, 230):
            operands = (TensorType((rows, inner), "float32"), *weight)
            yield OpSample("products", "quantized_linear", operands, weight=1, fixed=True)
            if rows in (1, 14) and inner * columns > 100_000:
                yield OpSample("products, cold", "quantized_linear", operands, weight=1, fixed=True, cold=True)


def _elementwise(dtype: str, scale: int) -> Iterator[OpSample]:
    for count in (700, 6_000, 50_000, 210_000, 860_000, 2_600_000):
        shape = (count * (scale if count > 10_000 else 1),)
        x = TensorType(shape, dtype)
        for op in ("add", "multiply", "relu_grad"):
            yield OpSample("elementwise", op, (x, x))
        for op in ("subtract", "gelu_grad", "gelu_tanh_grad", "silu_grad", "silu_multiply"):
            yield OpSample("elementwise", op, (x, x))
        for op in ("nn.relu", "nn.gelu_tanh", "nn.gelu", "nn.silu", "tanh", "square"):
            yield OpSample("elementwise", op, (x,))
        yield OpSample("elementwise", "astype", (x,), {"dtype": "bfloat16" if dtype == "float32" else "float32"})
        yield OpSample("elementwise", "where", (TensorType(shape, "bool"), x, x))
        yield from _updates(x)
    x = TensorType((29, 350), dtype)
    yield OpSample("views", "permute_dims", (x,), {"axes": (1, 0)})
    yield OpSample("views", "reshape", (x,), {"shape": (29, 5, 70)})
    yield OpSample("views", "split", (x,), {"axis": 0, "sizes": (3, 7, 8, 11)})


def _updates(x: TensorType) -> Iterator[OpSample]:
    """Return gradient sums and optimizer steps: their operands were last used in the previous step."""
    number = TensorType((), x.dtype)
    yield OpSample("updates", "add", (x, x), cold=True)
    yield OpSample("updates", "sgd_step", (x, x, number), {"decay": 0.0}, cold=True)
    yield OpSample("updates", "moving_average", (x, x), {"decay": 0.9, "weight": 1 - 0.9}, cold=True)
    yield OpSample("updates", "moving_square", (x, x), {"decay": 0.99}, cold=True)
    yield OpSample("updates", "adam_step", (x, x, x, number, number, number), {"decay": 0.01}, cold=True)


def _rows(dtype: str, scale: int) -> Iterator[OpSample]:
    for rows, width in ((3, 350), (29, 350), (115, 700), (460, 700), (920, 1100)):
        x, w = TensorType((rows * scale, width), dtype), TensorType((width,), dtype)
        norm = {"axes": (1,), "epsilon": 1e-5}
        yield OpSample("rows", "nn.layer_norm", (x, w, w), norm)
        for op in ("nn.rms_norm", "rms_norm_rounded"):
            yield OpSample("rows", op, (x, w), norm)
        for op in ("layer_norm", "rms_norm"):
            yield OpSample("rows", f"{op}_grad", (x, w, x), norm)
            yield OpSample("rows", f"{op}_weight_grad", (x, x), {**norm, "dtype": dtype})
        yield OpSample("rows", "nn.softmax", (x,), {"axis": 1})
        yield OpSample("rows", "sum", (x,), {"axis": (0,), "keepdims": False})
        yield OpSample("rows", "sum", (x,), {"axis": (1,), "keepdims": True})
        yield OpSample("rows", "mean", (x,), {"axis": (1,), "keepdims": True})
    for batch, heads, length, width in (
        (4, 5, 29, 48),
        (2, 5, 58, 48),
        (3, 5, 115, 48),
        (1, 7, 230, 48),
        (5, 7, 115, 80),
    ):
        q = TensorType((batch, heads * scale, length, width), dtype)
        attrs = {"scale": 0.15, "causal": length > 100, "masked": False, "boolean": False}
        yield OpSample("attention", "nn.scaled_dot_product_attention", (q, q, q), attrs, heads_last=True)
        yield OpSample("attention", "attention_grad", (q, q, q, q), attrs, heads_last=True)
        if length == 58:
            mask = TensorType((batch, 1, length, length), "bool")
            masked = {**attrs, "masked": True, "boolean": True}
            yield OpSample("attention", "nn.scaled_dot_product_attention", (q, q, q, mask), masked, heads_last=True)
            yield OpSample("attention", "attention_grad", (q, q, q, q, mask), masked, heads_last=True)
    for rows in (1, 29, 230):
        x, angle = TensorType((1, 7 * scale, rows, 48), dtype), TensorType((1, 1, rows, 48), dtype)
        yield OpSample("elementwise", "rotary", (x, angle, angle))
