"""Gradients of convolutions: each of the two kinds is the other's data gradient; the weight gradient op is shared.

``nn.conv2d_weight_grad`` and its family sum products of two tensors over the batch and all spatial positions: `x`, as
read by a plain convolution, and `y`, of its result's shape. `strides`, `padding` and `dilation` are those of the
convolution; `kernel` is the weight's spatial shape, and `channels` its second dim, which determines the number of
groups. A spatial dim is whole on a device, since both operands would need halos along it. The batch may be split, and
gives a partial sum.
"""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.spatial import convolution_workspace
from distir_relax.ops.spatial.strides import ends, spatial_rank, strided_windows, torch_widths
from distir_relax.ops.spatial.window_ops import window_sizes
from distir_relax.ops.table import (
    SCATTER,
    Attrs,
    Backward,
    Code,
    Cost,
    Gradient,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    gradient_of,
    operands,
    parse_rule,
)


def convolution_gradient(count: int) -> Gradient:
    """Return the gradient facet of a convolution over `count` spatial dims."""
    return gradient_of(
        lambda b: _transposed_convolution(b, b.grad, b.x(1), b.x(0)),
        lambda b: _of_weight(b, count, b.x(0), b.grad, b.x(1), b.attrs),
    )


def transposed_gradient(count: int) -> Gradient:
    """Return the gradient facet of a transposed convolution over `count` spatial dims; padding may be negative."""

    def of_data(b: Backward) -> Value:
        grad, attrs = _cropped(b)
        return b.emit(f"nn.conv{count}d", grad, b.x(1), **attrs, groups=b.attrs["groups"])  # type: ignore[no-any-return]

    def of_weight(b: Backward) -> Value:
        grad, attrs = _cropped(b)
        return _of_weight(b, count, grad, b.x(0), b.x(1), attrs)

    return gradient_of(of_data, of_weight)


def _transposed_convolution(b: Backward, grad: Value, weight: Value, like: Value) -> Value:
    """Emit the transposed convolution of `grad` with the shape of `like`, for any remainder of the strides."""
    count, low = spatial_rank(b.attrs), ends(b.attrs)[0]
    groups = like.tensor.shape[1] // max(weight.tensor.shape[1], 1)
    windows = strided_windows(grad.tensor, {**b.attrs, "padding": (0,) * 2 * count}, weight.tensor.shape[2:], SCATTER)
    high = tuple(
        w.result_size - low[i] - n for i, (w, n) in enumerate(zip(windows, like.tensor.shape[2:], strict=True))
    )
    geometry = {**_geometry(b.attrs), "padding": (*low, *high)}
    return b.emit(f"nn.conv{count}d_transpose", grad, weight, **geometry, groups=groups)  # type: ignore[no-any-return]


def _of_weight(b: Backward, count: int, x: Value, y: Value, weight: Value, attrs: Any) -> Value:
    _, channels, *kernel = weight.tensor.shape
    name = f"nn.conv{count}d_weight_grad"
    return b.emit(name, x, y, channels=channels, kernel=tuple(kernel), **_geometry(attrs))  # type: ignore[no-any-return]


def _geometry(attrs: Any) -> dict[str, Any]:
    return {key: attrs[key] for key in ("strides", "padding", "dilation")}


def _cropped(b: Backward) -> tuple[Value, dict[str, Any]]:
    """Return the gradient and attributes without negative padding: the elements it added are cropped."""
    padding, grad = b.attrs["padding"], b.grad
    if min(padding) < 0:
        low, high = ends({"padding": tuple(min(n, 0) for n in padding)})
        grad = b.emit("pad", grad, low=(0, 0, *low), high=(0, 0, *high), value=0.0)
    return grad, {**_geometry(b.attrs), "padding": tuple(max(n, 0) for n in padding)}


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, y = types
    if not len(x.shape) == len(y.shape) == spatial_rank(attrs) + 2 or x.dtype != y.dtype or x.shape[0] != y.shape[0]:
        raise ValueError(f"expected two tensors of {spatial_rank(attrs) + 2} dims, one batch and one dtype")
    sizes = window_sizes(strided_windows(x, attrs, attrs["kernel"]))
    groups = _groups(x, attrs)
    if y.shape[2:] != sizes or (groups and (x.shape[1] % groups or y.shape[1] % groups)):
        raise ValueError(f"{y} is no result of {groups} groups, of spatial shape {sizes}, for data {x}")
    return (TensorType((y.shape[1], attrs["channels"], *attrs["kernel"]), x.dtype),)


def _groups(x: TensorType, attrs: Attrs) -> int:
    return x.shape[1] // attrs["channels"] if attrs["channels"] else 1


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    count, groups = spatial_rank(attrs), max(_groups(types[0], attrs), 1)
    read, result, kernel = (" ".join(f"[{letter}{i}]" for i in range(count)) for letter in "rmk")
    sizes = {"g": groups, "i": types[0].shape[1] // groups, "o": types[1].shape[1] // groups}
    text = f"n (g i) {read}, n (g o) {result} -> (g o) i {kernel}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape], sizes)


def _torch(attrs: Attrs) -> str:
    low, high = ends(attrs)
    even, zeros = low == high and min(low) >= 0, (0,) * len(low)
    padded = "{0}" if even else f"F.pad({{0}}, {torch_widths(low, high)!r})"
    weight = "{0}.new_empty(({1}.shape[1], {channels}, *{kernel}))"
    return (
        f"torch.ops.aten.convolution_backward({{1}}, {padded}, {weight}, None, {{strides}}, "
        f"{low if even else zeros!r}, {{dilation}}, False, {zeros!r}, {{0}}.shape[1] // {{channels}}, "
        "(False, True, False))[1]"
    )


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * types[1].elements * math.prod(results[0].shape[1:])


for _n in (1, 2, 3):
    define(
        f"nn.conv{_n}d_weight_grad",
        Semantics(infer=_infer, torch=_torch, linear=(operands(0), operands(1))),
        Split(_rule, localize=lambda attrs, types, results: {**attrs, "channels": results[0].shape[1]}),
        cost=Cost(flops=_flops, cpu_workspace=convolution_workspace.weight_gradient, contiguous=(0, 1)),
        code=Code(
            relax=f"conv_weight_grad(R.nn.conv{_n}d, {{0}}, {{1}}, {{kernel}}, {{strides}}, {{padding}}, {{dilation}}, "
            "{channels})"
        ),
        gradient=gradient_of(
            lambda b: _transposed_convolution(b, b.x(1), b.grad, b.x(0)),
            lambda b: b.emit(
                b.op.name.removesuffix("_weight_grad"),
                b.x(0),
                b.grad,
                **_geometry(b.attrs),
                groups=_groups(b.x(0).tensor, b.attrs),
            ),
        ),
        traits={Trait.ZERO_IF_EMPTY},
    )
