"""Convolutions, plain and transposed, over one to three spatial dims: ``nn.conv2d`` and its family.

Layouts are torch's: data ``N C spatial``, weights ``O I spatial`` (``I O spatial`` for transposed ones). The
attributes: `strides` and `dilation` per spatial dim, `groups`, and `padding`: the low ends of all spatial dims, then
the high ends. The padding of a transposed convolution is cropped from its result; torch's `output_padding` makes the
high ends smaller.
A spatial dim is split with halos (`StridedWindow`); input channels are summed, output channels and groups split freely.
The bias is a separate op: if input channels are split it must be added once, after the reduction.
"""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.layout import is_symbolic
from distir_relax.ops.spatial import convolution_workspace
from distir_relax.ops.spatial.convolution_gradients import convolution_gradient, transposed_gradient
from distir_relax.ops.spatial.strides import (
    batched,
    channels_first,
    distribute_padding,
    ends,
    onnx_windows,
    per_dim,
    permute_layout,
    relax_padding,
    set_padding,
    spatial_rank,
    strided_windows,
    torch_widths,
)
from distir_relax.ops.spatial.window_ops import spatial_names, window_sizes, with_windows
from distir_relax.ops.table import (
    GATHER,
    SCATTER,
    Attrs,
    Builder,
    Code,
    Cost,
    Expression,
    Gradient,
    IncrementalForm,
    IncrementalStep,
    Localize,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    StridedWindow,
    Trait,
    Types,
    Work,
    aten,
    cast,
    define,
    fill_before,
    look_back,
    onnx,
    operands,
    parse_rule,
    relax,
    reshape_to,
)
from distir_relax.ops.table.entry import Infer, RuleOf
from distir_relax.ops.table.onnx_quantization import exact_integers, requantize


def _windows(types: Types, attrs: Attrs, transposed: bool) -> tuple[StridedWindow, ...]:
    return strided_windows(types[0], attrs, types[1].shape[2:], SCATTER if transposed else GATHER)


def _infer(transposed: bool) -> Infer:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (x, w), groups = types, attrs["groups"]
        if not len(x.shape) == len(w.shape) == spatial_rank(attrs) + 2 or x.dtype != w.dtype:
            raise ValueError(f"expected data and weights of {spatial_rank(attrs) + 2} dims and one dtype")
        channels, results = w.shape[1] * groups, w.shape[0]
        if transposed:
            channels, results = results, channels
        if x.shape[1] != channels or (groups and w.shape[0] % groups):
            raise ValueError(f"{x.shape[1]} channels in, weights {w.shape} and {groups} groups do not fit")
        sizes = window_sizes(_windows(types, attrs, transposed))
        return (TensorType((x.shape[0], results, *sizes), x.dtype),)

    return infer


def _rule(transposed: bool) -> RuleOf:
    """Return the rule. The first dim of the weights has the output channels by group; if transposed, the input's."""
    first, second = "io" if transposed else "oi"

    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        windows, groups = _windows(types, attrs, transposed), attrs["groups"]
        names = spatial_names(windows)
        kernel = " ".join(f"[k{w.index}]" for w in windows)
        sizes = {"g": groups, first: types[1].shape[0] // groups, second: types[1].shape[1]}
        text = f"n (g i) {names}, (g {first}) {second} {kernel} -> n (g o) {names}"
        return with_windows(parse_rule(text, [t.shape for t in types], [results[0].shape], sizes), windows)

    return rule


def _localize(transposed: bool) -> Localize:
    def localize(attrs: Attrs, types: Types, results: Types) -> dict[str, Any]:
        # If a device has no channels of any group, the number of groups is irrelevant.
        channels, inner = (results if transposed else types)[0].shape[1], types[1].shape[1]
        return {**attrs, "groups": channels // inner if inner else 1}

    return localize


def _flops(transposed: bool) -> Work:
    return lambda types, attrs, results: (
        2.0 * (types if transposed else results)[0].elements * math.prod(types[1].shape[1:])
    )


def _torch_conv(attrs: Attrs) -> str:
    low, high = ends(attrs)
    if low == high:
        return f"convolutions.convolution({{0}}, {{1}}, {{strides}}, {low!r}, {{dilation}}, {{groups}})"
    padded, none = f"F.pad({{0}}, {torch_widths(low, high)!r})", (0,) * len(low)
    return f"convolutions.convolution({padded}, {{1}}, {{strides}}, {none!r}, {{dilation}}, {{groups}})"


def _torch_transposed(name: str) -> Any:
    def expression(attrs: Attrs) -> str:
        low, high = ends(attrs)
        symmetric = low == high and min(low) >= 0
        padding = repr(low) if symmetric else "0"
        call = f"F.{name}({{0}}, {{1}}, None, {{strides}}, {padding}, 0, {{groups}}, {{dilation}})"
        return call if symmetric else f"F.pad({call}, {torch_widths([-n for n in low], [-n for n in high])!r})"

    return expression


def _relax_transposed(name: str) -> Any:
    def expression(attrs: Attrs) -> str:
        low, high = ends(attrs)
        zeros = (0,) * len(low)
        call = (
            f"R.nn.{name}({{0}}, {{1}}, {{strides}}, {tuple(max(n, 0) for n in (*low, *high))!r}, {zeros!r}, "
            "{dilation}, {groups})"
        )
        widths = [0, 0, 0, 0, *(max(-n, 0) for pair in zip(low, high, strict=True) for n in pair)]
        return f"R.nn.pad({call}, {widths!r})" if any(widths) else call

    return expression


def _unstrided_dims(op: Op) -> list[int]:
    count, strides = spatial_rank(op.attrs), enumerate(op.attrs["strides"])  # type: ignore[arg-type]
    padding: Any = op.attrs["padding"]
    return [2 + i for i, stride in strides if stride == 1 and not is_symbolic(padding[i::count])]


def _continuation(name: str) -> IncrementalForm:
    def compute(step: IncrementalStep) -> Value:
        """Read the earlier positions under the kernel; the first ones are the padding, of zeros."""
        (x, weight), index, extra = step.operands, step.dim - 2, step.extras[0]
        (window,) = [w for w in _windows([x.tensor, weight.tensor], step.attrs, False) if w.index == index]
        data = look_back(step, 0, window.low, window.reach)
        if window.low > 0 and extra is not None and extra < 0:
            data = fill_before(step, data, window.low, 0.0)
        y: Value = step.emit(name, data, weight, **set_padding(step.attrs, {index: (0, 0)}))
        return y

    return IncrementalForm(dims=_unstrided_dims, compute=compute, carries=True, is_windowed=True)


def _define(
    name: str, transposed: bool, torch: Expression, relax: Expression, cpu_workspace: Work, gradient: Gradient
) -> None:
    define(
        name,
        Semantics(infer=_infer(transposed), torch=torch, linear=(operands(0), operands(1))),
        Split(_rule(transposed), localize=_localize(transposed), windowed=set_padding),
        cost=Cost(flops=_flops(transposed), cpu_workspace=cpu_workspace, contiguous=(0, 1)),
        code=Code(relax=relax),
        gradient=gradient,
        incremental=None if transposed else _continuation(name),
        traits={Trait.ZERO_IF_EMPTY},
    )


for _n in (1, 2, 3):
    _define(
        f"nn.conv{_n}d",
        False,
        _torch_conv,
        f"R.nn.conv{_n}d({{0}}, {{1}}, {{strides}}, {{padding}}, {{dilation}}, {{groups}})",
        convolution_workspace.convolution,
        convolution_gradient(_n),
    )
    _define(
        f"nn.conv{_n}d_transpose",
        True,
        _torch_transposed(f"conv_transpose{_n}d"),
        _relax_transposed(f"conv{_n}d_transpose"),
        convolution_workspace.transposed_convolution,
        transposed_gradient(_n),
    )


# ATen spellings


def _add_bias(g: Builder, y: Value, bias: Value | None) -> Any:
    if bias is None:
        return y
    return g.emit("add", y, reshape_to(g, bias, (*bias.tensor.shape, *(1 for _ in y.tensor.shape[2:]))))


def _conv(
    g: Builder,
    x: Value,
    weight: Value,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    count = len(weight.tensor.shape) - 2
    dilation, stride = per_dim(dilation, count), per_dim(stride, count)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.tensor.shape[2:], strict=True)]
        widths = distribute_padding(total, "SAME_UPPER")
    else:
        widths = per_dim(padding, count) * 2
    attrs = {"strides": stride, "padding": widths, "dilation": dilation, "groups": groups}
    return batched(
        g, x, count, lambda data: _add_bias(g, g.emit(f"nn.conv{count}d", data, weight, **attrs), bias)
    )  # fmt: skip


def _conv_transpose(
    g: Builder, x: Value, weight: Value, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    count = len(weight.tensor.shape) - 2
    low, more = per_dim(padding, count), per_dim(output_padding, count)
    attrs: dict[str, Any] = {
        "strides": per_dim(stride, count),
        "padding": (*low, *(a - b for a, b in zip(low, more, strict=True))),
        "dilation": per_dim(dilation, count),
        "groups": groups,
    }
    return batched(
        g, x, count, lambda data: _add_bias(g, g.emit(f"nn.conv{count}d_transpose", data, weight, **attrs), bias)
    )  # fmt: skip


aten(*(f"conv{n}d.{how}" for n in (1, 2, 3) for how in ("default", "padding")))(_conv)
aten("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")(_conv_transpose)


@aten("convolution.default")
def _convolution(
    g: Builder, x: Value, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if transposed:
        return _conv_transpose(g, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _conv(g, x, weight, bias, stride, padding, dilation, groups)


# Relax spellings


def _relax_conv(count: int, transposed: bool) -> None:
    name = f"nn.conv{count}d{'_transpose' if transposed else ''}"
    order = ("IO" if transposed else "OI") + "DHW"[3 - count :]

    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        weight = permute_layout(g, args[1], attrs["kernel_layout"], order)
        if attrs["out_dtype"] not in (None, "", "void", args[0].tensor.dtype):
            raise NotImplementedError(f"a convolution of {args[0].tensor.dtype} in {attrs['out_dtype']}")
        padding = relax_padding(attrs["padding"], count)
        if transposed:
            more = per_dim(attrs["output_padding"], count)
            padding = (*padding[:count], *(a - b for a, b in zip(padding[count:], more, strict=True)))
        options: dict[str, Any] = {
            "strides": per_dim(attrs["strides"], count),
            "padding": padding,
            "dilation": per_dim(attrs["dilation"], count),
            "groups": int(attrs["groups"]),
        }
        layouts = attrs["data_layout"], attrs["out_layout"]
        return channels_first(g, args[0], *layouts, count, lambda data: g.emit(name, data, weight, **options))

    relax(f"relax.{name}")(convert)


for _n in (1, 2, 3):
    _relax_conv(_n, False)
    _relax_conv(_n, True)


# ONNX spellings


@onnx("Conv")
def _onnx_conv(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _windowed(g, x[0], x[1], x[2] if x.has(2) else None, attrs)


@onnx("com.microsoft::NhwcConv")
def _nhwc_conv(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """Data (n, d..., c) and weight (m, k..., c), as written by ONNX Runtime's layout transformer."""
    rank = len(x[0].tensor.shape)
    inner, last = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    data, weight = (g.emit("permute_dims", part, axes=inner) for part in (x[0], x[1]))
    return g.emit("permute_dims", _windowed(g, data, weight, x[2] if x.has(2) else None, attrs), axes=last)


@onnx("ConvInteger")
def _conv_integer(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    data = exact_integers(g, x[0], x[2] if x.has(2) else None)
    weight = exact_integers(g, x[1], _channels(g, x[3], x[1], 0) if x.has(3) else None)
    return cast(g, _windowed(g, data, weight, None, attrs), "int32")


@onnx("QLinearConv")
def _qlinear_conv(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    data, weight = exact_integers(g, x[0], x[2]), exact_integers(g, x[3], _channels(g, x[5], x[3], 0))
    bias = cast(g, x[8], "float64") if x.has(8) else None
    total = _windowed(g, data, weight, bias, attrs)
    return requantize(g, total, (x[1], _channels(g, x[4], x[3], 1), x[6]), x[7])


def _channels(g: Builder, side: Value, weight: Value, axis: int) -> Any:
    """Return the numbers of the channels of a convolution along an axis of its weight or result."""
    rank = len(weight.tensor.shape)
    if side.tensor.elements == 1:
        return reshape_to(g, side, ())
    return reshape_to(g, side, tuple(side.tensor.elements if d == axis else 1 for d in range(rank)))


def _windowed(g: Builder, data: Value, weight: Value, bias: Value | None, attrs: Attrs) -> Any:
    kernel = weight.tensor.shape[2:]
    windows = onnx_windows(data, kernel, attrs)
    return _add_bias(g, g.emit(f"nn.conv{len(kernel)}d", data, weight, **windows, groups=attrs.get("group", 1)), bias)


@onnx("ConvTranspose")
def _onnx_conv_transpose(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    kernel = x[1].tensor.shape[2:]
    count, how = len(kernel), attrs.get("auto_pad", "NOTSET")
    windows = onnx_windows(x[0], kernel, {**attrs, "auto_pad": "NOTSET"})
    more = attrs.get("output_padding", (0,) * count)
    sizes = list(zip(x[0].tensor.shape[2:], kernel, windows["strides"], windows["dilation"], strict=True))
    output_shape = attrs.get("output_shape", [n * s for n, _, s, _ in sizes] if how.startswith("SAME") else None)
    if output_shape is not None:
        full_sizes = [s * (n - 1) + (k - 1) * d + 1 + p for (n, k, s, d), p in zip(sizes, more, strict=True)]
        windows["padding"] = distribute_padding(
            [a - b for a, b in zip(full_sizes, output_shape[-count:], strict=True)], how
        )
    low, high = windows["padding"][:count], windows["padding"][count:]
    windows["padding"] = (*low, *(a - b for a, b in zip(high, more, strict=True)))
    y = g.emit(f"nn.conv{count}d_transpose", x[0], x[1], **windows, groups=attrs.get("group", 1))
    return _add_bias(g, y, x[2] if x.has(2) else None)
