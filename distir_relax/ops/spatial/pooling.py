"""Max and average pooling over one to three spatial dims.

The attributes are those of convolutions (`distir_relax.ops.spatial.convolution`), with `pool_size` for the kernel; an
average has no dilation. A `ceil_mode` is written as more padding at the high ends. Max pooling pads with minus
infinity. Of an average's padding, `counted` (low ends, then high ends) is included in its divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.ir import Attribute, TensorType, Value
from distir_relax.layout import is_always
from distir_relax.ops.spatial.pooling_gradients import average_pool_gradient, max_pool_gradient
from distir_relax.ops.spatial.strides import (
    batched,
    channels_first,
    ends,
    onnx_windows,
    per_dim,
    relax_padding,
    set_padding,
    spatial_rank,
    strided_windows,
    torch_widths,
)
from distir_relax.ops.spatial.window_ops import define_spatial
from distir_relax.ops.table import (
    Attrs,
    Builder,
    OnnxOperands,
    StridedWindow,
    Types,
    aten,
    cast,
    gradient_of,
    onnx,
    operands,
    relax,
)

OnEmit = Callable[[Any, Attrs], None]


def _windows(types: Types, attrs: Attrs) -> tuple[StridedWindow, ...]:
    return strided_windows(types[0], attrs, attrs["pool_size"])


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return float(results[0].elements * math.prod(attrs["pool_size"]))


def _has_torch_padding(attrs: Attrs) -> bool:
    """Return whether torch's max pooling supports this padding."""
    low, high = ends(attrs)
    fits = (is_always(0, "<=", n) and is_always(2 * n, "<=", k) for n, k in zip(low, attrs["pool_size"], strict=True))
    return low == high and all(fits)


def _padded_bytes(x: TensorType, attrs: Attrs) -> float:
    """Return the bytes of the data with its padding."""
    low, high = ends(attrs)
    sizes = (n + a + b for n, a, b in zip(x.shape[2:], low, high, strict=True))
    return math.prod((*x.shape[:2], *sizes)) * (x.bytes / max(x.elements, 1))


def _max_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace: a padded copy, and the indices that torch computes with maxima over more than one dim."""
    padded = 0.0 if _has_torch_padding(attrs) else _padded_bytes(types[0], attrs)
    return padded + (8.0 * results[0].elements if spatial_rank(attrs) > 1 else 0.0)


def _average_workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace: a padded copy, and the sum if the divisor is a tensor."""
    if not any(attrs["padding"]):
        return 0.0
    return _padded_bytes(types[0], attrs) + (0.0 if _all_counted(attrs) else float(results[0].bytes))


def _torch_max(name: str) -> Any:
    def expression(attrs: Attrs) -> str:
        low, high = ends(attrs)
        if _has_torch_padding(attrs):
            return f"F.{name}({{0}}, {{pool_size}}, {{strides}}, {low!r}, {{dilation}})"
        is_padded = any(n != 0 for n in (*low, *high))
        padded = f'F.pad({{0}}, {torch_widths(low, high)!r}, value=float("-inf"))' if is_padded else "{0}"
        return f"F.{name}({padded}, {{pool_size}}, {{strides}}, 0, {{dilation}})"

    return expression


def _localize_average(attrs: Attrs, new: Mapping[int, Sequence[int]]) -> dict[str, Attribute]:
    counted, count = list(attrs["counted"]), spatial_rank(attrs)
    for i, (low, high) in new.items():
        counted[i], counted[i + count] = min(low, counted[i]), min(high, counted[i + count])
    return {**set_padding(attrs, new), "counted": tuple(counted)}


def _all_counted(attrs: Attrs) -> bool:
    return bool(attrs["counted"] == attrs["padding"])


def _counted_ends(attrs: Attrs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ends({"padding": attrs["counted"]})


def _torch_average(name: str) -> Any:
    def pool(data: str) -> str:
        return f"F.{name}({data}, {{pool_size}}, {{strides}})"

    def expression(attrs: Attrs) -> str:
        (low, high), (first, last) = ends(attrs), _counted_ends(attrs)
        if all(n == 0 for n in (*low, *high)):
            return pool("{0}")
        total = pool(f"F.pad({{0}}, {torch_widths(low, high)!r})")
        if _all_counted(attrs):
            return total
        ones = f"F.pad(torch.ones_like({{0}}[:1, :1]), {torch_widths(first, last)!r}, value=1.0)"
        rest = torch_widths(
            [a - b for a, b in zip(low, first, strict=True)], [a - b for a, b in zip(high, last, strict=True)]
        )
        return f"{total} / {pool(f'F.pad({ones}, {rest!r})')}"

    return expression


def _relax_widths(low: tuple[int, ...], high: tuple[int, ...]) -> list[int]:
    return [0, 0, 0, 0, *(n for pair in zip(low, high, strict=True) for n in pair)]


def _relax_average(name: str) -> Any:
    def expression(attrs: Attrs) -> str:
        (low, high), (first, last) = ends(attrs), _counted_ends(attrs)
        zeros = (0,) * len(attrs["padding"])
        pool = f"R.nn.{name}({{data}}, {{pool_size}}, {{strides}}, {zeros!r}, count_include_pad=True)"
        if not any((*low, *high)):
            return pool.replace("{data}", "{0}")
        widths = _relax_widths(low, high)
        total = pool.replace("{data}", f"R.nn.pad({{0}}, {widths!r})")
        if _all_counted(attrs):
            return total
        inner = _relax_widths(first, last)
        outer = [a - b for a, b in zip(widths, inner, strict=True)]
        ones = f'R.nn.pad(R.nn.pad(R.ones_like({{0}}), {inner!r}, "constant", 1.0), {outer!r})'
        return f"R.divide({total}, {pool.replace('{data}', ones)})"

    return expression


for _n in (1, 2, 3):
    define_spatial(
        f"nn.max_pool{_n}d",
        _n,
        _windows,
        torch=_torch_max(f"max_pool{_n}d"),
        relax=f"R.nn.max_pool{_n}d({{0}}, {{pool_size}}, {{strides}}, {{padding}}, {{dilation}})",
        windowed=set_padding,
        flops=_flops,
        workspace=_max_workspace,
        gradient=gradient_of(max_pool_gradient),
    )
    define_spatial(
        f"nn.avg_pool{_n}d",
        _n,
        _windows,
        torch=_torch_average(f"avg_pool{_n}d"),
        relax=_relax_average(f"avg_pool{_n}d"),
        linear=(operands(0),),
        windowed=_localize_average,
        flops=_flops,
        workspace=_average_workspace,
        gradient=gradient_of(average_pool_gradient),
    )


# ATen spellings


def _ceil_padding(x: Value, attrs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the padding at the high ends that stands for `ceil_mode`: the last window must begin before it."""
    more = []
    for w in strided_windows(x.tensor, attrs, attrs["pool_size"]):
        span = w.size + w.low + w.high - w.extent
        count = -(-span // w.stride) + 1
        if (count - 1) * w.stride >= w.size + w.low:
            count -= 1
        more.append(max(0, (count - 1) * w.stride - span))
    return tuple(more)


def emit_pooling(
    g: Builder, name: str, x: Value, ceil: bool, attrs: dict[str, Any], on_emit: OnEmit | None = None
) -> Any:
    """Emit a pooling of `x`, whose batch dim is optional; `ceil_mode` becomes padding.

    `on_emit` is called with the data and the attributes of the emitted op.
    """
    count = spatial_rank(attrs)
    if "float" not in x.tensor.dtype:
        # float32 represents every 8-bit integer, but not wider ones.
        if x.tensor.dtype not in ("uint8", "int8") or name != "max_pool":
            raise NotImplementedError(f"a pooling of {x.tensor.dtype}")
        return cast(g, emit_pooling(g, name, cast(g, x, "float32"), ceil, attrs, on_emit), x.tensor.dtype)

    def emit(data: Value) -> Any:
        low, high = ends(attrs)
        full = dict(attrs)
        if ceil:
            # A kernel may exceed the data in this mode only; the elements beyond are not counted.
            sizes = [n + a + b for n, a, b in zip(data.tensor.shape[2:], low, high, strict=True)]
            full["pool_size"] = tuple(min(k, n) for k, n in zip(attrs["pool_size"], sizes, strict=True))
            high = tuple(a + b for a, b in zip(high, _ceil_padding(data, full), strict=True))
        full["padding"] = (*low, *high)
        if on_emit is not None:
            on_emit(data, full)
        return g.emit(f"nn.{name}{count}d", data, **full)

    return batched(g, x, count, emit)


def max_pool(count: int, on_emit: OnEmit | None = None) -> Any:
    """Return the conversion of max pooling over `count` spatial dims; `on_emit` is as in `emit_pooling`."""

    def convert(
        g: Builder, x: Value, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> Any:
        low = per_dim(padding, count)
        attrs = {
            "pool_size": per_dim(size, count),
            "strides": per_dim(stride or size, count),
            "padding": (*low, *low),
            "dilation": per_dim(dilation, count),
        }
        return emit_pooling(g, "max_pool", x, ceil, attrs, on_emit)

    return convert


def _avg_pool(count: int) -> Any:
    def convert(
        g: Builder, x: Value, size: Any, stride: Any = (), padding: Any = 0, ceil: bool = False, include: bool = True,
        divisor: int | None = None,
    ) -> Any:  # fmt: skip
        low, pool = per_dim(padding, count), per_dim(size, count)
        attrs = {
            "pool_size": pool,
            "strides": per_dim(stride or size, count),
            "padding": (*low, *low),
            "counted": (*low, *low) if include else (0,) * 2 * count,
        }
        if divisor is None:
            return emit_pooling(g, "avg_pool", x, ceil, attrs)
        if ceil:
            raise NotImplementedError("an average of windows with both ceil_mode and a divisor of its own")
        y = emit_pooling(g, "avg_pool", x, False, {**attrs, "counted": attrs["padding"]})
        return g.emit("multiply", y, g.constant(math.prod(pool) / divisor, y.tensor.dtype))

    return convert


def even_average(count: int) -> Any:
    """Return the conversion of average pooling with equal windows to a given number of them along each dim."""

    def convert(g: Builder, x: Value, size: Any) -> Any:
        sizes, axes = per_dim(size, count), tuple(range(len(x.tensor.shape) - count, len(x.tensor.shape)))
        have = tuple(x.tensor.shape[a] for a in axes)
        if all(n == 1 for n in sizes):
            return g.emit("mean", x, axis=axes, keepdims=True)
        pool = tuple(n // m for n, m in zip(have, sizes, strict=True))
        return _avg_pool(count)(g, x, pool)

    return convert


for _n in (1, 2, 3):
    aten(f"max_pool{_n}d.default")(max_pool(_n))
    aten(f"avg_pool{_n}d.default")(_avg_pool(_n))


# Relax spellings


def _relax_pool(name: str, count: int) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        padding = relax_padding(attrs["padding"], count)
        options = {
            "pool_size": per_dim(attrs["pool_size"], count),
            "strides": per_dim(attrs["strides"], count),
            "padding": padding,
        }
        dilation = per_dim(attrs["dilation"], count)
        if name == "max_pool":
            options["dilation"] = dilation
        else:
            if dilation != (1,) * count:
                raise NotImplementedError(f"an average of windows with dilation {dilation}")
            options["counted"] = padding if attrs["count_include_pad"] else (0,) * 2 * count
        if attrs["ceil_mode"]:
            raise NotImplementedError("a pooling with ceil_mode; give the padding at the high ends instead")
        layouts = attrs["layout"], attrs["out_layout"]
        return channels_first(g, args[0], *layouts, count, lambda data: emit_pooling(g, name, data, False, options))

    relax(f"relax.nn.{name}{count}d")(convert)


for _n in (1, 2, 3):
    _relax_pool("max_pool", _n)
    _relax_pool("avg_pool", _n)


# ONNX spellings


@onnx("AveragePool")
def _onnx_average(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    kernel = tuple(attrs["kernel_shape"])
    options: dict[str, Any] = {"pool_size": kernel, **onnx_windows(x[0], kernel, attrs)}
    if any(d != 1 for d in options.pop("dilation")):
        raise NotImplementedError("an average of windows with a dilation")
    options["counted"] = options["padding"] if attrs.get("count_include_pad", 0) else (0,) * 2 * len(kernel)
    return emit_pooling(g, "avg_pool", x[0], bool(attrs.get("ceil_mode", 0)), options)


def _onnx_global(op_type: str, name: str) -> None:
    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        return g.emit(name, x[0], axis=tuple(range(2, len(x[0].tensor.shape))), keepdims=True)

    onnx(op_type)(convert)


_onnx_global("GlobalAveragePool", "mean")
_onnx_global("GlobalMaxPool", "max")
