"""At least one small instance of every op that a rank runs by itself, with odd shapes: what backends are tested on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distir_relax.ir import Attribute, Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.kernels.sampling import Resizing
from distir_relax.ops import OF_PROGRAMS, Trait, entries, evaluate, infer
from distir_relax.ops.spatial.resample import sampling_attrs
from tests.foreign import packed_attrs, tir_attrs
from tests.lowering.group_samples import of_groups

Sample = tuple[str, list[TensorType], dict[str, Attribute]]
_POSITIVE = ("log", "sqrt", "safe_sqrt", "rsqrt", "power", "nn.batch_norm", "adam_step")
NO_WEIGHTS = 99
"""More operands than an op has: from there on they are weights."""


def f32(*shape: int) -> TensorType:
    """A float32 tensor type."""
    return TensorType(shape, "float32")


def of(dtype: str, *shape: int) -> TensorType:
    """A tensor type."""
    return TensorType(shape, dtype)


def samples(with_tvm: bool = True) -> list[Sample]:
    """Instances as (op, operand types, attributes); those of functions of TVM's need it."""
    return [
        *_elementwise(), *_movement(), *_tails(), *_products(), *_normalization(),
        *_windows(), *_indexing(), *_reductions(), *_attention(), *_marks(), *(_foreign() if with_tvm else ()),
        *_recurrences(), *of_groups(), *_quantized(), *_steps(), *_renormalized_rows(), *_of_indices(),
    ]  # fmt: skip


def _of_indices() -> list[Sample]:
    return [
        ("indexed", [], {"value": value, "names": ("n",), "sizes": (4,), "shape": (3, 1, 5), "dtype": dtype})
        for value, dtype in (
            ("i2 <= i0 + n and (i0 // 2 == i2 // n or i2 != 3)", "bool"), ("True", "bool"),
            ("max(3 - i0*i2, n, i2)", "int64"), ("-i2", "int32"),
        )
    ]  # fmt: skip


def _marks() -> list[Sample]:
    return [("to_place", [f32(3, 5)], {"place": 1}), ("restrict", [f32(3, 5)], {})]


def _foreign() -> list[Sample]:
    return [("call_tir", [f32(3, 5)], tir_attrs(3, 5, "float32")),
            ("call_dps_packed", [f32(3, 5)], packed_attrs(3, 5, "float32"))]  # fmt: skip


def _elementwise() -> list[Sample]:
    found: list[Sample] = []
    for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum"):
        found.append((name, [f32(3, 5, 7), f32(5, 1)], {}))
    for name in ("floor_divide", "mod"):
        found += [(name, [f32(3, 7), f32(7)], {}), (name, [of("int64", 3, 7), of("int64", 7)], {})]
    found.append(("power", [f32(3, 5), f32(3, 5)], {}))
    for name in ("logical_and", "logical_or", "logical_xor"):
        found.append((name, [of("bool", 3, 5), of("bool", 5)], {}))
    found.append(("logical_not", [of("bool", 3, 5)], {}))
    for name in ("negative", "exp", "log", "sqrt", "safe_sqrt", "rsqrt", "abs", "square", "tanh", "sigmoid", "erf",
                 "sin", "cos", "floor", "ceil", "round", "trunc", "sign", "tan", "atan", "isnan", "isinf", "isfinite",
                 "nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "asin", "acos", "atanh", "sinh", "cosh", "asinh",
                 "acosh", "expm1", "log1p", "stop_gradient"):  # fmt: skip
        found.append((name, [f32(3, 37)], {}))
    found += [("atan2", [f32(3, 5), f32(5)], {}), ("bitwise_not", [of("int64", 3, 5)], {})]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
        found.append((name, [of("int64", 3, 5), of("int64", 5)], {}))
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
        found.append((name, [of("int64", 4, 5), of("int64", 5)], {}))
    names = ("relu_grad", "gelu_grad", "gelu_tanh_grad", "silu_grad", "nn.binary_cross_entropy")
    found += [(name, [f32(3, 5), f32(3, 5)], {}) for name in names]
    return [
        *found,
        ("squared_error_grad", [f32(3, 5), f32(3, 5)], {"scale": 0.25}),
        ("sgd", [f32(3, 5), f32(3, 5)], {"rate": 0.1}),
        ("moving_average", [f32(3, 5), f32(3, 5)], {"decay": 0.9, "weight": 0.3}),
        ("moving_square", [f32(3, 5), f32(3, 5)], {"decay": 0.99}),
        ("add_scaled", [f32(3, 5), f32(3, 5)], {"alpha": 0.3}),
        ("sgd_step", [f32(3, 5), f32(3, 5), f32()], {"decay": 0.0}),
        ("sgd_step", [f32(3, 5), f32(3, 5), f32()], {"decay": 0.3}),
        ("adam_step", [f32(3, 5), f32(3, 5), f32(3, 5), f32(), f32(), f32()], {"decay": 0.3}),
        ("assign", [f32(3, 5), f32(3, 5)], {}),
        ("exp", [of("float64", 3, 5)], {}),
        ("nn.gelu", [f32(0, 5)], {}),
        *(("clip", [f32(3, 5)], {"min": low, "max": high}) for low, high in ((0.5, 1.25), (float("-inf"), 1.0))),
        ("clip", [of("int64", 7)], {"min": 1, "max": 2**63 - 1}),
        ("nn.hardtanh", [f32(3, 5)], {"min": -0.5, "max": 1.25}),
        ("next_seed", [of("int64")], {}),
        ("uniform", [of("int64"), of("int64", 3), of("int64", 5)], {"dtype": "float32"}),
        ("nn.dropout", [f32(3, 5), of("int64"), of("int64", 3), of("int64", 5)], {"rate": 0.3}),
        *(("astype", [of(a, 3, 5)], {"dtype": b}) for a, b in (("int64", "float32"), ("float32", "int32"))),
        ("astype", [of("bool", 3)], {"dtype": "float32"}),
        ("where", [of("bool", 4, 1), f32(4, 5), f32()], {}),
        ("constant", [], {"value": 2.5, "dtype": "float32"}),
        ("constant", [], {"value": True, "dtype": "bool"}),
        ("constant", [], {"value": float("-inf"), "dtype": "float32"}),
        ("arange", [], {"start": 1, "end": 12, "stride": 3, "dtype": "int64"}),
    ]


def _movement() -> list[Sample]:
    found: list[Sample] = [
        ("reshape", [f32(2, 3, 35)], {"shape": (6, 5, 7)}),
        ("reshape", [f32(1, 0, 4, 8)], {"shape": (1, 4, 0)}),
        ("permute_dims", [f32(2, 3, 5)], {"axes": (2, 0, 1)}),
        ("repeat_elements", [f32(3, 5)], {"axis": 0, "repeats": (3, 1, 2)}),
        ("broadcast_to", [f32(3, 1)], {"shape": (2, 3, 5)}),
        ("append", [f32(3, 2), f32(3, 5)], {"axis": 1}),
        ("concat", [f32(3, 2), f32(3, 5)], {"axis": 1}),
        ("concat", [f32(3, 0), f32(3, 5)], {"axis": 1}),
        ("split", [f32(3, 7)], {"axis": 1, "sizes": (2, 4, 1)}),
        ("split", [f32(3, 7)], {"axis": 1, "sizes": (3, 0, 4)}),
        ("split", [f32(3, 7)], {"axis": 1, "sizes": (7,)}),
        ("strided_slice", [f32(7, 9)], {"axes": (1, 0), "begin": (2, 1), "end": (9, 4), "strides": (3, 1)}),
        ("strided_slice", [f32(7, 9)], {"axes": (1,), "begin": (2,), "end": (2,), "strides": (1,)}),
        ("pad", [f32(3, 5)], {"low": (0, 2), "high": (1, 0), "value": 1.5}),
        ("slices", [f32(3, 11)], {"dim": 1, "intervals": ((1, 3), (5, 6), (8, 11))}),
        ("slices", [f32(11)], {"dim": 0, "intervals": ((4, 9),)}),
        ("flip", [f32(3, 5)], {"axis": 1}),
    ]
    for name in ("tril", "triu"):
        found += [(name, [f32(3, 5, 7)], {"k": 1}), (name, [f32(7, 5)], {"k": -1})]
    return found


def _products() -> list[Sample]:
    return [
        ("matmul", [f32(5, 7), f32(7, 3)], {}),
        ("matmul", [f32(2, 3, 5, 7), f32(3, 7, 33)], {}),
        ("matmul", [f32(4, 0), f32(0, 3)], {}),
        ("matmul", [of("float64", 5, 7), of("float64", 7, 3)], {}),
        ("linear", [f32(2, 5, 63), f32(17, 63)], {}),
        ("linear", [f32(4, 0), f32(3, 0)], {}),
        ("linear_weight_grad", [f32(2, 5, 7), f32(2, 5, 3)], {}),
        ("linear_weight_grad", [f32(0, 5, 7), f32(0, 5, 3)], {}),
        ("linear_bias", [f32(2, 5, 7), f32(3, 7), f32(3)], {}),
        ("matmul_bias", [f32(5, 7), f32(7, 3), f32(3)], {}),
        ("joined_linear", [f32(2, 5, 7), f32(3, 7), f32(33, 7)], {}),
        ("joined_linear_bias", [f32(2, 5, 7), f32(3, 7), f32(3), f32(33, 7), f32(33)], {}),
        ("joined_matmul", [f32(5, 7), f32(7, 3), f32(7, 1)], {}),
        ("joined_matmul_bias", [f32(5, 7), f32(7, 3), f32(3), f32(7, 1), f32(1)], {}),
    ]


def _normalization() -> list[Sample]:
    return [
        ("nn.layer_norm", [f32(2, 3, 37), f32(37), f32(37)], {"axes": (2,), "epsilon": 1e-5}),
        ("nn.layer_norm", [f32(2, 3, 5), f32(3, 5), f32(3, 5)], {"axes": (1, 2), "epsilon": 1e-5}),
        ("nn.rms_norm", [f32(2, 3, 37), f32(37)], {"axes": (2,), "epsilon": 1e-6}),
        ("rms_norm_rounded", [f32(2, 3, 37), f32(37)], {"axes": (2,), "epsilon": 1e-6}),
        *(
            (f"{name}_grad", [f32(*shape), f32(*shape[first:]), f32(*shape)], {"axes": axes, "epsilon": 1e-5})
            for name in ("layer_norm", "rms_norm")
            for shape, first, axes in (((2, 3, 37), 2, (2,)), ((2, 3, 5), 1, (1, 2)))
        ),
        *(
            (f"{name}_weight_grad", [f32(*shape)] * 2, {"axes": axes, "epsilon": 1e-5, "dtype": "float32"})
            for name in ("layer_norm", "rms_norm")
            for shape, axes in (((2, 3, 37), (2,)), ((3, 5), (0, 1)), ((0, 5), (1,)))
        ),
        *(
            (name, [f32(3, 5, 127), f32(3, 5, 127)], {})
            for name in ("silu_multiply", "gelu_multiply", "gelu_tanh_multiply")
        ),
        ("rotary", [f32(2, 3, 5, 34), f32(1, 1, 5, 34), f32(2, 1, 5, 34)], {}),
        ("nn.softmax", [f32(2, 3, 37)], {"axis": 2}),
        ("nn.softmax", [f32(2, 3, 5)], {"axis": 1}),
        ("nn.log_softmax", [f32(2, 3, 37)], {"axis": 2}),
        ("nn.batch_norm", [f32(2, 5, 3, 4), *[f32(5)] * 4], {"epsilon": 1e-5}),
    ]


def _indexing() -> list[Sample]:
    found: list[Sample] = [
        ("take", [f32(5, 6), of("int64", 2, 3)], {"axis": 0}),
        ("check_indices", [of("int64", 2, 3)], {"low": 0, "high": 5, "user": "take"}),
        ("take", [f32(3, 5), of("int32", 4)], {"axis": 1}),
        ("topk", [f32(3, 7)], {"axis": 1, "k": 3, "largest": True}),
        ("topk", [f32(7, 3)], {"axis": 0, "k": 2, "largest": False}),
        ("argsort", [f32(3, 7)], {"axis": 1, "descending": True}),
        ("argsort", [f32(7, 3)], {"axis": 0, "descending": False}),
        ("gather_elements", [f32(5, 6), of("int64", 5, 4)], {"axis": 1}),
        ("cumprod", [f32(3, 5)], {"axis": 1}),
        ("prod", [f32(3, 5)], {"axis": 0, "keepdims": False}),
        ("prod", [f32(3, 5, 2)], {"axis": 1, "keepdims": True}),
        *(
            (
                "image.grid_sample",
                [f32(2, 3, 5, 4), f32(2, 3, 7, 2)],
                {"method": method, "padding_mode": padding, "align_corners": aligned},
            )
            for method, padding, aligned in (("bilinear", "zeros", False), ("nearest", "border", True))
        ),
        ("index_tensor", [f32(5, 6, 2), of("int64", 3, 1), of("int64", 4)], {"count": 2}),
        ("segment_sum", [f32(6, 5), of("int64", 6)], {"num_segments": 7}),
        ("segment_sum", [f32(3), of("int64", 3)], {"num_segments": 5}),
    ]
    for how in ("update", "add", "mul", "max", "min"):
        found.append(("scatter_elements", [f32(5, 6), of("int64", 1, 6), f32(1, 6)], {"axis": 0, "reduction": how}))
    return found


def _reductions() -> list[Sample]:
    found: list[Sample] = [
        *((name, [f32(3, 7)], {"axis": 1}) for name in ("cumsum", "cummax", "cummin", "logcumsumexp")),
        ("cumsum", [of("int64", 3, 7)], {"axis": 0}),
        ("cumsum", [of("int32", 3, 5)], {"axis": 1}),
        ("sum", [of("int32", 3, 5)], {"axis": (1,), "keepdims": False}),
        ("sum", [f32(4, 0)], {"axis": (1,), "keepdims": False}),
    ]
    for name in ("argmax", "argmin"):
        found += [
            (name, [f32(3, 5, 7)], {"axis": 1, "keepdims": False}),
            (name, [f32(3, 7)], {"axis": 1, "keepdims": True}),
        ]
    for name in ("sum", "mean", "max", "min"):
        for axes, keep in (((0, 2), True), ((1,), False), ((), True)):
            found.append((name, [f32(3, 5, 7)], {"axis": axes, "keepdims": keep}))
    return found


def _windows() -> list[Sample]:
    one: dict[str, Attribute] = {"groups": 1, "dilation": (1, 1)}
    line: dict[str, Attribute] = {"groups": 1, "dilation": (1,)}
    cube: dict[str, Attribute] = {"groups": 1, "dilation": (1, 1, 1), "strides": (1, 2, 1)}
    return [
        ("nn.conv1d", [f32(2, 3, 9), f32(5, 3, 3)], {**line, "strides": (2,), "padding": (1, 0)}),
        ("nn.conv2d", [f32(2, 3, 9, 7), f32(5, 3, 3, 2)], {**one, "strides": (2, 1), "padding": (1, 0, 0, 2)}),
        ("nn.conv2d", [f32(2, 4, 9, 7), f32(4, 1, 3, 3)],
         {"groups": 4, "dilation": (2, 1), "strides": (1, 1), "padding": (2, 1, 2, 1)}),
        ("nn.conv2d", [f32(2, 3, 0, 7), f32(5, 3, 3, 2)], {**one, "strides": (1, 1), "padding": (2, 0, 0, 0)}),
        ("nn.conv2d", [f32(2, 0, 4, 4), f32(5, 0, 3, 2)], {**one, "strides": (1, 1), "padding": (0, 0, 0, 0)}),
        ("nn.conv3d", [f32(2, 3, 4, 5, 6), f32(5, 3, 2, 3, 1)], {**cube, "padding": (0, 1, 0, 1, 1, 0)}),
        ("nn.conv1d_weight_grad", [f32(2, 3, 9), f32(2, 5, 4)],
         {"dilation": (1,), "strides": (2,), "padding": (1, 0), "kernel": (3,), "channels": 3}),
        ("nn.conv2d_weight_grad", [f32(2, 4, 9, 7), f32(2, 6, 4, 7)],
         {"dilation": (1, 1), "strides": (2, 1), "padding": (1, 0, 0, 2), "channels": 2, "kernel": (3, 3)}),
        ("nn.conv3d_weight_grad", [f32(2, 4, 3, 4, 5), f32(2, 3, 2, 4, 5)],
         {"strides": (1,) * 3, "padding": (0, 0, 1) * 2, "dilation": (1,) * 3, "channels": 4, "kernel": (2, 1, 3)}),
        ("nn.conv1d_transpose", [f32(2, 3, 5), f32(3, 4, 3)], {**line, "strides": (2,), "padding": (1, 0)}),
        ("nn.conv2d_transpose", [f32(2, 3, 5, 4), f32(3, 4, 3, 2)],
         {**one, "strides": (2, 1), "padding": (1, 0, 0, 0)}),
        ("nn.conv2d_transpose", [f32(2, 4, 5, 4), f32(4, 3, 2, 2)],
         {**one, "groups": 2, "strides": (3, 2), "padding": (0, 0, -1, 0)}),
        ("nn.conv3d_transpose", [f32(2, 3, 2, 3, 2), f32(3, 4, 2, 2, 1)], {**cube, "padding": (0,) * 6}),
        ("nn.max_pool1d", [f32(2, 3, 9)],
         {"pool_size": (3,), "strides": (2,), "padding": (1, 2), "dilation": (1,)}),
        ("nn.max_pool2d", [f32(2, 3, 9, 7)],
         {"pool_size": (3, 2), "strides": (2, 1), "padding": (1, 0, 2, 1), "dilation": (2, 1)}),
        ("nn.max_pool2d", [f32(2, 3, 0, 7)],
         {"pool_size": (3, 2), "strides": (2, 1), "padding": (2, 0, 0, 0), "dilation": (1, 1)}),
        ("nn.max_pool3d", [f32(2, 3, 4, 5, 6)],
         {"pool_size": (2, 2, 3), "strides": (2, 1, 2), "padding": (0,) * 6, "dilation": (1, 1, 1)}),
        ("nn.avg_pool1d", [f32(2, 3, 9)],
         {"pool_size": (3,), "strides": (2,), "padding": (1, 1), "counted": (1, 1)}),
        ("nn.avg_pool2d", [f32(2, 3, 9, 7)],
         {"pool_size": (3, 2), "strides": (2, 1), "padding": (1, 0, 1, 1), "counted": (1, 0, 0, 0)}),
        ("nn.avg_pool2d", [f32(2, 3, 8, 6)],
         {"pool_size": (2, 2), "strides": (2, 2), "padding": (0,) * 4, "counted": (0,) * 4}),
        ("nn.avg_pool3d", [f32(2, 3, 4, 5, 6)],
         {"pool_size": (2, 2, 3), "strides": (2, 1, 2), "padding": (0, 0, 1) * 2, "counted": (0,) * 6}),
        ("nn.adaptive_avg_pool1d", [f32(2, 3, 7)], {"output_size": (5,)}),
        ("nn.adaptive_avg_pool2d", [f32(2, 3, 7, 5)], {"output_size": (3, 7)}),
        ("nn.adaptive_avg_pool3d", [f32(2, 3, 3, 7, 5)], {"output_size": (2, 3, 4)}),
        *_parts_of_dims(),
        *(
            ("image.resize2d", [f32(2, 3, 4, 5)],
             {"size": size, "method": method, "coordinate_transformation_mode": place})
            for method, place, size in (
                ("linear", "half_pixel", (7, 3)), ("linear", "align_corners", (7, 1)), ("cubic", "half_pixel", (3, 7)),
                ("cubic", "align_corners", (4, 9)), ("nearest_neighbor", "asymmetric", (7, 3)),
            )
        ),
        ("image.resize3d", [f32(2, 3, 2, 4, 5)],
         {"size": (3, 3, 7), "method": "linear", "coordinate_transformation_mode": "half_pixel"}),
        ("image.resize3d", [f32(2, 3, 2, 4, 5)],
         {"size": (3, 4, 7), "method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric"}),
        ("nn.upsample_nearest", [f32(2, 3, 4, 5)], {"strides": (2, 3), "padding": (0, 0, 0, 0)}),
        ("nn.upsample_nearest", [f32(2, 3, 4, 5)], {"strides": (2, 1), "padding": (1, 0, 1, 0)}),
    ]  # fmt: skip


def _parts_of_dims() -> list[Sample]:
    """Ops whose windows follow a formula, on whole dims and on parts of them."""
    part = {"part": ((11, 3, 6, 2), ())}
    pool = {"pool_size": (3, 2), "strides": (2, 1), "padding": (1, 0, 1, 0), "dilation": (1, 1)}
    antialias = sampling_attrs(Resizing("linear", "half_pixel", 0.5, antialias=True))
    nearest = sampling_attrs(Resizing("nearest_neighbor", "half_pixel", 1.5, "round_prefer_floor"))
    linear = {"method": "linear", "coordinate_transformation_mode": "half_pixel"}
    return [
        ("nn.adaptive_max_pool1d", [f32(2, 3, 7)], {"output_size": (5,)}),
        ("nn.adaptive_max_pool2d", [f32(2, 3, 7, 5)], {"output_size": (3, 4), **part}),
        ("nn.adaptive_max_pool3d", [f32(2, 3, 3, 7, 5)], {"output_size": (2, 3, 4)}),
        ("nn.adaptive_avg_pool2d", [f32(2, 3, 7, 5)], {"output_size": (3, 4), **part}),
        ("nn.adaptive_avg_pool1d", [of("float16", 2, 3, 7)], {"output_size": (3,), "part": ((11, 3, 6, 2),)}),
        ("image.resize2d", [f32(2, 3, 5, 5)], {"size": (3, 4), **linear, "part": ((11, 4, 6, 2), ())}),
        ("image.resize2d", [f32(2, 3, 5, 5)], {"size": (3, 4), **linear, "part": ((11, 4, 6, 2), (5, 0, 4, 0))}),
        ("nn.adaptive_max_pool1d_places", [f32(2, 3, 7)], {"output_size": (5,), "plane": (1,)}),
        ("nn.adaptive_max_pool2d_places", [f32(2, 3, 7, 5)], {"output_size": (3, 4), "plane": (5, 1), **part}),
        ("nn.adaptive_max_pool3d_places", [f32(2, 3, 3, 7, 5)], {"output_size": (2, 3, 4), "plane": (35, 5, 1)}),
        ("nn.max_pool1d_places", [f32(2, 3, 7)],
         {"pool_size": (3,), "strides": (1,), "padding": (1, 1), "dilation": (1,), "output_size": (7,), "plane": (1,)}),
        ("nn.max_pool2d_places", [f32(2, 3, 7, 5)],
         {**pool, "output_size": (3, 4), "plane": (1, 11), "part": ((11, 3, 6, 2), ())}),
        ("nn.max_pool3d_places", [f32(2, 3, 4, 4, 5)],
         {"pool_size": (2, 2, 3), "strides": (2, 1, 2), "padding": (0, 0, 1) * 2, "dilation": (1, 1, 1),
          "output_size": (2, 3, 3), "plane": (20, 5, 1)}),
        ("resample", [f32(3, 9, 5)], {"axis": 1, "size": 4, **antialias}),
        ("resample", [of("int64", 9, 5)], {"axis": 0, "size": 13, **nearest}),
    ]  # fmt: skip


def _tails() -> list[Sample]:
    shape = {"rank": 2, "dim": 1, "value": 0.0}
    narrow, wide = {**shape, "size": 3, "padded": 4}, {**shape, "size": 0, "padded": 4}
    return [
        ("pad_tail", [f32(5, 3)], {**narrow, "blocks": 1, "shape": (5, 3)}),
        ("pad_tail", [f32(5, 9)], {**narrow, "blocks": 3, "shape": (5, 9)}),
        ("pad_tail", [f32(5, 0)], {**wide, "blocks": 3, "shape": (5, 0)}),
        ("trim_tail", [f32(5, 4)], {**narrow, "blocks": 1, "shape": (5, 4)}),
        ("trim_tail", [f32(5, 12)], {**narrow, "blocks": 3, "shape": (5, 12)}),
        ("trim_tail", [f32(5, 12)], {**wide, "blocks": 3, "shape": (5, 12)}),
    ]


def _attention() -> list[Sample]:
    q, k, v, y = f32(2, 3, 5, 8), f32(2, 3, 7, 8), f32(2, 3, 7, 6), f32(2, 3, 5, 6)
    plain: dict[str, Attribute] = {"scale": 0.35, "causal": False, "masked": False, "boolean": False}
    plain["dtype"] = "float32"
    name = "nn.scaled_dot_product_attention"
    return [
        (name, [q, k, v], plain),
        (name, [q, k, v], {**plain, "causal": True}),
        (name, [q, k, v, f32(2, 1, 5, 7)], {**plain, "masked": True}),
        (name, [q, k, v, of("bool", 5, 7)], {**plain, "masked": True, "boolean": True}),
        (name, [f32(2, 0, 5, 8), f32(2, 0, 7, 8), f32(2, 0, 7, 6)], plain),
        *_attention_of_states(),
        ("attention_grad", [q, k, v, y], plain),
        ("attention_grad", [q, k, v, y], {**plain, "causal": True}),
        ("attention_grad", [q, k, v, y, f32(2, 1, 5, 7)], {**plain, "masked": True}),
        ("attention_grad", [q, k, v, y, of("bool", 5, 7)], {**plain, "masked": True, "boolean": True}),
        *_attention_parts(),
    ]


def _attention_parts() -> list[Sample]:
    q, k, v, y, rows = f32(2, 3, 5, 8), f32(2, 3, 7, 8), f32(2, 3, 7, 6), f32(2, 3, 5, 6), f32(2, 3, 5, 1)
    plain: dict[str, Attribute] = {"scale": 0.35, "causal": False, "masked": False, "boolean": False}
    boolean = {**plain, "masked": True, "boolean": True}
    return [
        ("attention_part", [q, k, v], plain),
        ("attention_part", [q, k, v, f32(2, 1, 5, 7)], {**plain, "masked": True}),
        ("attention_part", [q, k, v, of("bool", 5, 7)], boolean),
        ("attention_part_grad", [q, k, v, y, rows, rows], plain),
        ("attention_part_grad", [q, k, v, y, rows, rows, of("bool", 5, 7)], boolean),
    ]


def _renormalized_rows() -> list[Sample]:
    return [("renormalized_rows", [f32(6, 4), of("int64", 5)], {"most": 1.5, "order": order}) for order in (1.0, 2.0)]


def _attention_of_states() -> list[Sample]:
    states = [f32(1, 3, 5, 8), f32(1, 3, 5, 8), f32(1, 5, 18), f32(1, 3, 7, 8), f32(1, 7, 18)]
    plain: dict[str, Attribute] = {"scale": 0.35, "masked": False, "boolean": False, "dtype": "float32"}
    plain["views"] = ((2, (), ()), (1, (1, -1, 3, 6), (0, 2, 1, 3)))
    masked = {**plain, "masked": True, "boolean": True}
    name = "nn.attention_of_states"
    return [(name, states, plain), (name, [*states, of("bool", 5, 12)], masked)]


def _recurrences() -> list[Sample]:
    plain: dict[str, Attribute] = {"clip": float("inf"), "reverse": False, "extras": ()}
    lstm = plain | {"order": "ifco", "activations": ("sigmoid", "tanh", "hard_sigmoid")}
    gru = plain | {"order": "rzn", "activations": ("sigmoid", "tanh"), "reset_after": True}
    rnn = plain | {"activations": ("relu",)}
    extras = {"extras": ("peepholes", "lengths", "projection"), "reverse": True, "clip": 0.5}
    states = [f32(4, 2), f32(4, 5), f32(15), of("int64", 4), f32(2, 5)]
    plain_cell, ends = [f32(3, 4, 5), f32(5, 5), f32(4, 5)], [f32(3, 4, 2), f32(4, 2), f32(4, 5)]
    return [
        *(("nn.lstm", [f32(t, n, 20), f32(20, 5), f32(n, 5), f32(n, 5)], lstm) for t, n in ((3, 4), (3, 0), (0, 4))),
        ("nn.lstm", [f32(3, 4, 20), f32(20, 2), *states], lstm | extras),
        ("nn.gru", [f32(3, 4, 15), f32(15, 5), f32(4, 5), f32(15)], gru | {"extras": ("bias",)}),
        ("nn.gru", [f32(3, 4, 15), f32(15, 5), f32(4, 5)], gru | {"reset_after": False, "reverse": True}),
        ("nn.rnn", plain_cell, rnn),
        ("nn.recurrence_grad", [f32(3, 4, 20), f32(20, 2), *states, *ends], lstm | extras | {"cell": "lstm"}),
        ("nn.recurrence_weight_grad", [*plain_cell, plain_cell[0], plain_cell[2]], rnn | {"cell": "rnn"}),
        ("keep", [f32(3, 5), f32(3, 5)], {}),
        ("linear_scan", [f32(3, 5), f32(3, 5)], {"axis": 1}),
    ]


def _quantized() -> list[Sample]:
    eight, grouped, four = _weight("int8", 17, 96), _weight("int8", 17, 3, 32), _weight("uint8", 17, 3, 16)
    name, rows = "quantized_linear", {"dtype": "float32"}
    x, groups, numbers = f32(5, 96), of("int64", 3), of("int64", 5)
    stacks = [[of(t.dtype, 3, *t.shape) for t in weight] for weight in (eight, grouped, four)]
    return [
        *((name, [f32(2, 5, 96), *weight], {}) for weight in (eight, grouped, four)),
        (name, [f32(4, 0), *_weight("uint8", 3, 0, 16)], {}),
        (name, [f32(4, 96), *_weight("int8", 0, 96)], {}),
        (f"joined_{name}", [f32(2, 5, 96), *eight, *_weight("int8", 3, 96)], {}),
        (f"joined_{name}", [f32(2, 5, 96), *four, *_weight("uint8", 3, 3, 16)], {}),
        *(("quantized_grouped_matmul", [x, *stack, groups, groups], {}) for stack in stacks),
        *(("quantized_routed_matmul", [x, *stack, numbers, groups], {"count": 3}) for stack in stacks),
        ("dequantize", [of("int8", 2, 3, 5), f32(2, 3, 1)], {**rows, "grouped": False}),
        ("dequantize", _weight("uint8", 2, 3, 16), {**rows, "grouped": True}),
    ]


def _steps() -> list[Sample]:
    return [
        ("assign_where", [f32(3, 5), f32(3, 5), of("bool")], {}),
        ("ordered_sum", [f32(3, 5), f32(3, 5), f32(3, 5)], {}),
        ("shape_ops", [f32(3, 5)], {"count": 2}),
    ]


def _weight(dtype: str, *shape: int) -> list[TensorType]:
    numbers = of("float32" if len(shape) == 2 else "float16", *shape[:-1], 1)
    return [of(dtype, *shape), *[numbers] * (2 if dtype == "uint8" else 1)]


def sample_module(chosen: Sequence[Sample], weights_from: Sequence[int] = (NO_WEIGHTS,)) -> tuple[Module, list[Op]]:
    """A ranked module of one rank that runs all samples side by side, and the op of each.

    A sample is there once for each of `weights_from`: its operands from that one on are parameters, those before it
    inputs. Where it has too few operands for that to be anything new, it is not there again.
    """
    inputs: list[Input] = []
    ops: list[Op] = []
    outputs: list[Output] = []
    for number, (name, types, attrs) in enumerate(chosen):
        for first in sorted({min(first, len(types)) for first in weights_from}):
            operands = tuple(Value(f"x{number}_{first}_{i}", kind) for i, kind in enumerate(types))
            results = tuple(Value(f"y{number}_{first}_{i}", kind) for i, kind in enumerate(infer(name, types, attrs)))
            inputs += [Input(value, "input" if i < first else "parameter") for i, value in enumerate(operands)]
            ops.append(Op(name, operands, results, attrs))
            outputs += [Output(value.name, value) for value in results]
    inputs.sort(key=lambda item: item.role)
    function = Function("main_0", tuple(inputs), tuple(ops), tuple(outputs))
    return Module("ranked", (function,), ranks=("main_0",)), ops


def data(kind: TensorType, name: str, generator: torch.Generator) -> torch.Tensor:
    """Values of the type that suit op `name`: positive where it needs that, small row numbers, mixed truths."""
    if kind.dtype == "bool":
        values = torch.randint(0, 2, kind.shape, generator=generator).bool()
        if kind.shape:
            # A row of a mask that hides everything has no answer.
            values[..., :1] = True
        return values
    if "int" in kind.dtype:
        return torch.randint(1, 5, kind.shape, generator=generator, dtype=getattr(torch, kind.dtype))
    values = torch.randn(kind.shape, generator=generator, dtype=getattr(torch, kind.dtype))
    if name == "nn.binary_cross_entropy":
        return values.sigmoid()
    return values.abs() + 0.1 if name in _POSITIVE else values * 2


def local_ops() -> set[str]:
    """The names of the ops that a rank runs by itself."""
    layout = {"annotate_sharding", "redistribute"}
    return {
        e.name for e in entries() if Trait.ON_COMMUNICATOR not in e.traits and e.traits.isdisjoint(OF_PROGRAMS)
    } - layout


def operand_data(ops: Sequence[Op]) -> list[list[torch.Tensor]]:
    """Values for the operands of each op."""
    generator = torch.Generator().manual_seed(0)
    return [[data(v.tensor, op.name, generator) for v in op.operands] for op in ops]


def check_against_reference(
    ops: Sequence[Op], operands: Sequence[Sequence[torch.Tensor]], results: Sequence[torch.Tensor],
    tolerance: float | Callable[[Op], float],
) -> None:  # fmt: skip
    """Fail unless `results`, those of all ops one after the other, are what the op table says, type and all."""
    found = iter(results)
    for op, values in zip(ops, operands, strict=True):
        within = tolerance(op) if callable(tolerance) else tolerance
        for expected in evaluate(op, values):
            got = next(found)
            where = f"{op.name} of {[tuple(v.shape) for v in values]} with {dict(op.attrs)}"
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
            # Where large terms cancel, what is left has their rounding.
            largest = float(torch.nan_to_num(expected.double(), 0, 0, 0).abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(
                got.double(), expected.double(), atol=within * max(1.0, largest), rtol=within, equal_nan=True,
                msg=lambda text, where=where: f"{where}: {text}")  # fmt: skip
    assert next(found, None) is None
