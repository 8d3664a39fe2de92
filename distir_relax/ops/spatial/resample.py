"""Resizing of one dim, in all the forms of ONNX's Resize: ``resample``.

Attributes: the `axis` and its new `size`; `method` and `coordinate_transformation_mode` as in ``image.resize2d``, and
further ones; `scale`, result to operand; `roi`, the part of the dim that is resized; `rounding_method` of the nearest
element; `cubic_alpha`, `cubic_exclude` (no weight beyond the edges) and `antialias`.
See `distir_relax.kernels.sampling.Resizing`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.kernels.sampling import NEAREST, Resizing
from distir_relax.layout import floor_divide, is_symbolic
from distir_relax.ops.spatial.computed_windows import parts_of, sampled_windows, set_part
from distir_relax.ops.spatial.separable_gradients import apply_transpose
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Code,
    Cost,
    Rule,
    SampledWindow,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    dim_names,
    gradient_of,
    operands,
    parse_rule,
)

_MAX_DENOMINATOR = 1024
"""Maximum denominator of the scale of a symbolic size: others are decimal fractions, which round."""


def ratio_of_sizes(size: int, have: int) -> float:
    """Return the scale from one size to another; of symbolic sizes one must be a multiple of the other."""
    if not is_symbolic((size, have)):
        return size / have
    for first, second, is_inverse in ((size, have, False), (have, size, True)):
        times = floor_divide(first, second)
        if isinstance(times, int) and times * second == first:
            return 1 / times if is_inverse else float(times)
    raise NotImplementedError(f"a resize from {have} to {size}: expected a multiple")


def scaled_size(size: int, scale: float) -> int:
    """Return ``floor(size * scale)``."""
    if not is_symbolic(size):
        return math.floor(size * scale)
    numerator, denominator = scale.as_integer_ratio()
    if denominator > _MAX_DENOMINATOR:
        raise NotImplementedError(f"a resize of {size} by {scale}: expected a scale such as 2 or 0.25")
    return floor_divide(size * numerator, denominator)


def sampling_attrs(sampling: Resizing) -> dict[str, Any]:
    """Return the attributes of a sampling."""
    return {
        "method": sampling.method,
        "coordinate_transformation_mode": sampling.place,
        "scale": sampling.scale,
        "rounding_method": sampling.rounding,
        "roi": sampling.roi,
        "cubic_alpha": sampling.cubic_coefficient,
        "antialias": sampling.antialias,
        "cubic_exclude": sampling.exclude_outside,
    }


def _sampling(attrs: Attrs) -> Resizing:
    return Resizing(
        attrs["method"], attrs["coordinate_transformation_mode"], attrs["scale"], attrs["rounding_method"],
        attrs["roi"], attrs["cubic_alpha"], attrs["antialias"], attrs["cubic_exclude"],
    )  # fmt: skip


def _windows(types: Types, attrs: Attrs) -> tuple[SampledWindow, ...]:
    return sampled_windows(types[0], attrs, [attrs["axis"]], [attrs["size"]], [_sampling(attrs)], [False])


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    if attrs["method"] != NEAREST and "float" not in x.dtype:
        raise ValueError(f"expected floats to interpolate between, found {x.dtype}")
    shape = list(x.shape)
    (window,) = _windows(types, attrs)
    shape[attrs["axis"]] = window.result_size
    return (TensorType(tuple(shape), x.dtype),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types[0].shape))
    names[attrs["axis"]] = "()"
    text = " ".join(names)
    rule = parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape])
    return replace(rule, windows=_windows(types, attrs))


def _expression(attrs: Attrs) -> str:
    (part,) = parts_of(attrs, 1)
    sampling, default = _sampling(attrs), Resizing("", "")
    fields = [f"{key}={value!r}" for key, value in vars(sampling).items() if value != getattr(default, key)]
    tail = f", {part!r}" if part else ""
    return f"resample.weigh({{0}}, {attrs['axis']}, resample.Resizing({', '.join(fields)}), {attrs['size']}{tail})"


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 0.0 if attrs["method"] == NEAREST else 8.0 * results[0].elements


def _gradient(b: Backward) -> Value:
    axis = b.attrs["axis"]
    have = b.x().tensor.shape[axis]
    return apply_transpose(b, b.grad, axis, have, {**b.attrs, "axis": 1}, (have, have))


define(
    "resample",
    Semantics(infer=_infer, torch=_expression, linear=(operands(0),)),
    Split(
        _rule,
        localize=lambda attrs, types, results: {**attrs, "size": results[0].shape[attrs["axis"]]},
        windowed=set_part(1),
    ),
    cost=Cost(flops=_flops),
    code=Code(relax=_expression),
    gradient=gradient_of(_gradient),
    traits={Trait.ZERO_IF_EMPTY},
)
