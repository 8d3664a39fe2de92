"""Adaptive average and max pooling, with windows derived from the operand and result sizes.

Of `n` elements pooled to `m`, window `i` begins at ``floor(i n / m)`` and ends before ``ceil((i + 1) n / m)``. Windows
of equal size are ordinary pooling (`distir_relax.ops.spatial.pooling`). All are split with halos (`SampledWindow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import Adaptive
from distir_relax.ops.spatial.computed_windows import keeps, local_size, over_parts, sampled_windows, set_part
from distir_relax.ops.spatial.max_pool_indices import adaptive_places
from distir_relax.ops.spatial.pooling import even_average, max_pool
from distir_relax.ops.spatial.pooling_gradients import adaptive_max_pool_gradient
from distir_relax.ops.spatial.separable_gradients import separable_gradient
from distir_relax.ops.spatial.strides import batched, channels_first, per_dim
from distir_relax.ops.spatial.window_ops import define_spatial
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Expression,
    Gradient,
    Linear,
    SampledWindow,
    Types,
    aten,
    flops_per_operand,
    gradient_of,
    operands,
    relax,
)


def _windows(types: Types, attrs: Attrs) -> tuple[SampledWindow, ...]:
    size = attrs["output_size"]
    axes = range(2, len(types[0].shape))
    return sampled_windows(types[0], attrs, axes, size, [Adaptive()] * len(size), keeps(types, size))


def _over_parts(function: str, full: str) -> Callable[[Attrs], str]:
    """Return an expression that computes partial dims with `resample`, and the rest with `full`."""

    def expression(attrs: Attrs) -> str:
        text, is_all = over_parts(attrs, function, "resample.Adaptive()", attrs["output_size"])
        return text if is_all else full.replace("{0}", text)

    return expression


def _largest(attrs: Attrs) -> str:
    """Return an expression that reduces all dims with the kernels of `resample`."""
    text = "{0}"
    parts = attrs.get("part", ((),) * len(attrs["output_size"]))
    for i, (size, part) in enumerate(zip(attrs["output_size"], parts, strict=True)):
        text = f"resample.maximum({text}, {i + 2}, resample.Adaptive(), {size}, {part!r})"
    return text


def _define(
    name: str, dims: int, torch: Expression, relax: Expression, gradient: Gradient, linear: Linear = ()
) -> None:
    define_spatial(
        name,
        dims,
        _windows,
        torch=torch,
        relax=relax,
        localize=local_size("output_size"),
        windowed=set_part(dims),
        flops=flops_per_operand(),
        linear=linear,
        gradient=gradient,
    )


for _n in (1, 2, 3):
    _define(
        f"nn.adaptive_avg_pool{_n}d",
        _n,
        _over_parts("weigh", f"F.adaptive_avg_pool{_n}d({{0}}, {{output_size}})"),
        _over_parts("weigh", f"R.nn.adaptive_avg_pool{_n}d({{0}}, {{output_size}})"),
        separable_gradient("output_size"),
        linear=(operands(0),),
    )
    _define(
        f"nn.adaptive_max_pool{_n}d",
        _n,
        _over_parts("maximum", f"F.adaptive_max_pool{_n}d({{0}}, {{output_size}})"),
        _largest,
        gradient_of(adaptive_max_pool_gradient),
    )


# ATen spellings


def _reduced_dims(x: Value, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims reduced to one element, unless all are: reduced first, they need no gather if they are split."""
    first = len(x.tensor.shape) - len(sizes)
    axes = tuple(first + i for i, n in enumerate(sizes) if n == 1 and x.tensor.shape[first + i] > 1)
    return axes if any(n > 1 for n in sizes) else ()


def _adaptive_average(count: int) -> Any:
    def convert(g: Builder, x: Value, size: Any) -> Any:
        sizes = per_dim(size, count)
        if axes := _reduced_dims(x, sizes):
            x = g.emit("mean", x, axis=axes, keepdims=True)
        if all(n % m == 0 for n, m in zip(x.tensor.shape[-count:], sizes, strict=True)):
            return even_average(count)(g, x, sizes)
        return batched(g, x, count, lambda data: g.emit(f"nn.adaptive_avg_pool{count}d", data, output_size=sizes))

    return convert


def _adaptive_max(count: int) -> Any:
    def convert(g: Builder, x: Value, size: Any) -> Any:
        sizes = per_dim(size, count)
        places = batched(g, x, count, lambda data: adaptive_places(g, data, sizes))
        # From the innermost dim outwards, so that the first of equal elements gets the gradient. A dim with a window
        # inside of it is an exception: reduced first, it would select the first along the window.
        rank = len(x.tensor.shape)
        for axis in reversed(_reduced_dims(x, sizes)):
            if not g.training or all(n == 1 for n in sizes[axis - rank :]):
                x = g.emit("max", x, axis=(axis,), keepdims=True, ties="first")
        have = x.tensor.shape[-count:]
        if all(n % m == 0 for n, m in zip(have, sizes, strict=True)):
            return max_pool(count)(g, x, [n // m for n, m in zip(have, sizes, strict=True)]), places
        values = batched(g, x, count, lambda data: g.emit(f"nn.adaptive_max_pool{count}d", data, output_size=sizes))
        return values, places

    return convert


for _n in (1, 2, 3):
    aten(f"adaptive_avg_pool{_n}d.default")(_adaptive_average(_n))
    aten(f"adaptive_max_pool{_n}d.default")(_adaptive_max(_n))


# Relax spellings


def _relax_adaptive(count: int) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        def pool(x: Value) -> Any:
            return x if attrs["output_size"] is None else _adaptive_average(count)(g, x, attrs["output_size"])

        return channels_first(g, args[0], attrs["layout"], attrs["out_layout"], count, pool)

    relax(f"relax.nn.adaptive_avg_pool{count}d")(convert)


for _n in (1, 2, 3):
    _relax_adaptive(_n)
