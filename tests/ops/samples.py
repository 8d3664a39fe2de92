"""Sample instances of every op: operand types and attributes. An entry of the op table needs one row here.

A type is written as in program text (``f64[6,5]``). Floats are drawn from a normal distribution; ``i64[4] < 6`` are
integers below 6, ``i64[2] = 3 5`` are these, ``f64[4] > 0`` are positive floats, ``f64[4] < 1`` floats between -1 and
1, and ``f64[4] ~ 1`` floats between 0 and 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distir_relax.layout import DTYPES
from tests.foreign import packed_attrs, tir_attrs
from tests.ops.spatial_samples import SAMPLES as SPATIAL_SAMPLES


@dataclass(frozen=True)
class Sample:
    """One instance of an op: the operands as text, and the attributes."""

    operands: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def of(*operands: str, **attrs: Any) -> Sample:
    return Sample(operands, attrs)


def draw(text: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor as `text` describes it."""
    text, _, numbers = text.partition(" = ")
    match = re.fullmatch(r"(\w+)\[([\d,]*)\](?: ([<>~]) (\d+))?", text)
    assert match, text
    short, dims, relation, bound = match.groups()
    shape = [int(n) for n in dims.split(",") if n]
    dtype = getattr(torch, {short: long for long, (short, _) in DTYPES.items()}[short])
    if numbers:
        return torch.tensor([int(n) for n in numbers.split()], dtype=dtype).reshape(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, int(bound or 10), shape, generator=generator, dtype=dtype)
    drawn = torch.randn(shape, generator=generator, dtype=dtype)
    if relation == "~":
        return torch.rand(shape, generator=generator, dtype=dtype) * int(bound)
    if relation == "<":
        return drawn.tanh() * int(bound)
    return drawn.abs() + 0.1 + int(bound) if relation == ">" else drawn


_UNARY = [
    "negative",
    "exp",
    "sqrt",
    "safe_sqrt",
    "rsqrt",
    "log",
    "abs",
    "square",
    "tanh",
    "sigmoid",
    "erf",
    "sin",
    "cos",
    "tan",
    "atan",
    "floor",
    "ceil",
    "round",
    "trunc",
    "sign",
    *("sinh", "cosh", "asinh", "expm1", "log1p"),
    "nn.relu",
    "nn.gelu",
    "nn.gelu_tanh",
    "nn.silu",
    "isnan",
    "isinf",
    "isfinite",
]
_BINARY = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "mod",
    "power",
    "atan2",
    "maximum",
    "minimum",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
]

RECURRENT: dict[str, Any] = {"clip": math.inf, "reverse": False, "extras": ()}
LSTM = RECURRENT | {"order": "ifco", "activations": ("sigmoid", "tanh", "tanh")}
LSTM_OPERANDS = ("f64[3,4,20]", "f64[20,5]", "f64[4,5]", "f64[4,5]")
RNN = RECURRENT | {"activations": ("tanh",), "cell": "rnn"}
GRU = RECURRENT | {"order": "zrn", "activations": ("sigmoid", "tanh"), "reset_after": True}

SAMPLES: dict[str, list[Sample]] = {
    **{name: [of("f64[4,6] > 0")] for name in _UNARY},
    **{name: [of("f64[4,6] > 0", "f64[4,6] > 0"), of("f64[3,4,1] > 0", "f64[5] > 0")] for name in _BINARY},
    **{name: [of("bool[4,6]", "bool[6]")] for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": [of("bool[4,6]")],
    **{name: [of("f64[4,6] < 1")] for name in ("asin", "acos", "atanh")},
    "acosh": [of("f64[4,6] > 1")],
    **{name: [of("i64[4,6]", "i64[6]")] for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{name: [of("i64[4,6] < 99", "i64[6] < 5")] for name in ("left_shift", "right_shift")},
    "bitwise_not": [of("i32[4,6]")],
    "stop_gradient": [of("f64[4,6]")],
    "next_seed": [of("i64[]")],
    "uniform": [of("i64[]", "i64[4] < 99", "i64[1] < 9", "i64[6] < 99", dtype="float64"), of("i64[]", dtype="float16")],
    "nn.dropout": [
        of("f64[4,1,6]", "i64[]", "i64[4] < 99", "i64[1] < 9", "i64[6] < 99", rate=0.3),
        of("f64[]", "i64[]", rate=0.5),
        of("f64[127]", "i64[]", "i64[127] < 9999", rate=1.0),
    ],
    "clip": [of("f64[4,6]", min=-0.5, max=float("inf"))],
    "nn.hardtanh": [of("f64[4,6]", min=-0.5, max=1.0)],
    "nn.binary_cross_entropy": [of("f64[4,6] ~ 1", "f64[6]")],
    "astype": [of("f64[4,6]", dtype="int32"), of("bool[4]", dtype="float32"), of("f64[5]", dtype="float32")],
    "where": [of("bool[4,1]", "f64[4,6]", "f64[6]")],
    "constant": [of(value=2.5, dtype="float32"), of(value=float("-inf"), dtype="float64")],
    "relu_grad": [of("f64[4,5]", "f64[4,5]")],
    "gelu_grad": [of("f64[4,5]", "f64[4,5]")],
    "gelu_tanh_grad": [of("f64[4,5]", "f64[4,5]")],
    "silu_grad": [of("f64[4,5]", "f64[4,5]")],
    "squared_error_grad": [of("f64[4,5]", "f64[4,5]", scale=0.25)],
    "sgd": [of("f64[4,5]", "f64[4,5]", rate=0.1)],
    "moving_average": [
        of("f64[4,5]", "f64[4,5]", decay=0.9, weight=1 - 0.9),
        of("f64[4,5]", "f64[4,5]", decay=0.9, weight=1.0),
        of("f64[4,5]", "f64[4,5]", decay=0.9, weight=0.3),
    ],
    "moving_square": [of("f64[4,5]", "f64[4,5]", decay=0.99)],
    "add_scaled": [of("f64[4,5]", "f64[4,5]", alpha=0.3)],
    "sgd_step": [of("f64[4,5]", "f64[4,5]", "f64[]", decay=decay) for decay in (0.0, 0.3)],
    "adam_step": [
        of("f64[4,5]", "f64[4,5]", "f64[4,5] > 0", "f64[]", "f64[]", "f64[] > 0", decay=decay) for decay in (0.0, 0.3)
    ],
    "assign": [of("f64[4,5]", "f64[4,5]")],
    "ordered_sum": [of("f64[4,5]", "f64[4,5]", "f64[4,5]"), of("f64[4,5]")],
    "assign_where": [of("f64[4,5]", "f64[4,5]", "bool[]")],
    "matmul": [of("f64[4,5]", "f64[5,6]"), of("f64[2,1,4,5]", "f64[3,5,6]")],
    "linear": [of("f64[2,4,5]", "f64[6,5]")],
    "linear_weight_grad": [of("f64[2,4,5]", "f64[2,4,6]"), of("f64[5]", "f64[3]")],
    "quantized_linear": [
        of("f64[2,3,96]", "i8[6,96] < 100", "f64[6,1]"),
        of("f64[5,96]", "i8[6,3,32] < 100", "f64[6,3,1]"),
        of("f64[2,3,96]", "u8[6,3,16] < 256", "f64[6,3,1]", "f64[6,3,1]"),
    ],
    "joined_quantized_linear": [
        of("f64[2,3,96]", "i8[6,96] < 100", "f64[6,1]", "i8[5,96] < 100", "f64[5,1]"),
        of("f64[3,96]", "i8[6,3,32] < 100", "f64[6,3,1]", "i8[2,3,32] < 100", "f64[2,3,1]"),
    ],
    "quantized_grouped_matmul": [
        of("f64[7,96]", "i8[3,5,96] < 100", "f64[3,5,1]", "i64[3] < 3", "i64[3] < 8"),
        of("f64[7,96]", "u8[3,5,3,16] < 256", "f64[3,5,3,1]", "f64[3,5,3,1]", "i64[3] < 3", "i64[3] < 8"),
    ],
    "quantized_routed_matmul": [
        of("f64[7,96]", "i8[3,5,96] < 100", "f64[3,5,1]", "i64[7] < 5", "i64[3] = 0 1 3", count=4),
        of("f64[7,96]", "i8[3,5,3,32] < 100", "f64[3,5,3,1]", "i64[7] < 5", "i64[3] = 0 1 3", count=4),
    ],
    "dequantize": [
        of("i8[4,6,5] < 100", "f64[4,6,1]", grouped=False, dtype="float64"),
        of("i8[4,6,32] < 100", "f64[4,6,1]", grouped=True, dtype="float64"),
        of("u8[4,6,16] < 256", "f64[4,6,1]", "f64[4,6,1]", grouped=True, dtype="float64"),
    ],
    "linear_bias": [of("f64[2,4,5]", "f64[6,5]", "f64[6]")],
    "joined_linear": [of("f64[2,4,5]", "f64[6,5]", "f64[3,5]")],
    "joined_linear_bias": [of("f64[2,4,5]", "f64[6,5]", "f64[6]", "f64[3,5]", "f64[3]")],
    "joined_matmul": [of("f64[2,4,5]", "f64[5,6]", "f64[5,3]")],
    "joined_matmul_bias": [of("f64[2,4,5]", "f64[5,6]", "f64[6]", "f64[5,3]", "f64[3]")],
    "matmul_bias": [of("f64[4,5]", "f64[5,6]", "f64[6]")],
    "check_indices": [of("i64[4,3] < 5", low=-5, high=5, user="index"), of("i64[7] < 5", low=0, high=5, user="take")],
    "take": [
        of("f64[7,5]", "i64[2,3] < 7", axis=0),
        of("f64[4,7,5]", "i64[3] < 7", axis=1),
        of("f64[4,7]", "i64[] < 7", axis=1),
        of("f64[127,1]", "i64[5] < 127", axis=0),
    ],
    "index_tensor": [
        of("f64[4,5,6]", "i64[3,2] < 4", "i64[2] < 5", count=2),
        of("f64[4,5]", "i64[3] < 4", count=1),
    ],
    "gather_elements": [
        of("f64[4,5]", "i64[4,3] < 5", axis=1),
        of("f64[4,5]", "i64[2,5] < 4", axis=0),
        of("f64[4,5]", "i64[3,7] < 5", axis=1),
    ],
    "scatter_elements": [
        of("f64[4,5]", "i64[3,5] < 4", "f64[3,5]", axis=0, reduction="update"),
        of("f64[4,5]", "i64[4,7] < 5", "f64[4,7]", axis=1, reduction="add"),
        of("f64[7,3]", "i64[5,3] < 7", "f64[5,3]", axis=0, reduction="max"),
        of("f64[4,5]", "i64[4,7] < 5", "f64[4,7]", axis=1, reduction="mul"),
    ],
    "segment_sum": [of("f64[6,5]", "i64[6] < 7", num_segments=7), of("f64[7]", "i64[7] < 3", num_segments=4)],
    "grouped_matmul": [of("f64[7,5]", "f64[3,5,4]", "i64[3] < 3", "i64[3] < 8")],
    "grouped_weight_grad": [of("f64[7,5]", "f64[7,4]", "i64[3] < 3", "i64[3] < 8")],
    "group_numbers": [of(count=5)],
    "routed_matmul": [of("f64[7,5]", "f64[3,5,4]", "i64[7] < 5", "i64[3] = 0 1 3", count=4)],
    "routed_weight_grad": [of("f64[7,5]", "f64[7,4]", "i64[7] < 5", "i64[3] = 0 1 3", count=4)],
    "dispatch_rows": [of("f64[7,5]", "i64[7] < 3", "i64[3] = 0 1 2"), of("f64[7]", "i64[7] < 2", "i64[3] = 0 1 2")],
    "combine_rows": [of("f64[7,5]", "i64[7] < 3", "i64[3] = 0 1 2")],
    "arange": [of(start=2, end=9, stride=2, dtype="int64")],
    "indexed": [of(value="i1 <= i0 + n", names=("n",), sizes=(2,), shape=(3, 5), dtype="bool")],
    "sum": [
        of("f64[4,5,6]", axis=(1,), keepdims=False),
        of("f64[4,5]", axis=(), keepdims=False),
        of("f64[4,5,6]", axis=(0, 2), keepdims=True),
        of("f64[4]", axis=(0,), keepdims=False),
        of("i32[4,3]", axis=(0,), keepdims=False),
    ],
    "mean": [
        *(of("f64[4,5,6]", axis=axes, keepdims=False) for axes in ((), (1,))),
        of("f64[4,5,6]", axis=(0, 2), keepdims=True),
    ],
    "max": [
        of("f64[4,5,6]", axis=(1,), keepdims=False),
        of("f64[5]", axis=(), keepdims=True),
        of("i32[5,3]", axis=(0,), keepdims=False),
    ],
    "min": [
        of("f64[4,5,6]", axis=(1,), keepdims=False, ties="first"),
        of("f64[4,5,6]", axis=(2,), keepdims=True),
        of("u8[5,3]", axis=(0,), keepdims=False),
    ],
    "argmax": [of("f64[4,5,6]", axis=1, keepdims=False), of("f64[4,5]", axis=1, keepdims=True)],
    "argmin": [of("f64[4,5,6]", axis=0, keepdims=False)],
    "topk": [of("f64[4,5,6]", k=2, axis=1, largest=True), of("f64[4,5]", k=1, axis=0, largest=False)],
    "argsort": [of("f64[4,5]", axis=0, descending=True)],
    "flip": [of("f64[4,5]", axis=0)],
    "tril": [of("f64[3,4,5]", k=1)],
    "triu": [of("f64[3,4,5]", k=-1)],
    "nn.softmax": [of("f64[4,5,6]", axis=1)],
    "nn.log_softmax": [of("f64[4,5,6]", axis=2)],
    "cumsum": [of("f64[4,5]", axis=0), of("i32[4]", axis=0)],
    **{name: [of("f64[4,5]", axis=0), of("f64[3,7,2]", axis=1)] for name in ("cummax", "cummin", "logcumsumexp")},
    "cumprod": [of("f64[4,5]", axis=1)],
    "linear_scan": [of("f64[4,5]", "f64[4,5]", axis=0), of("f64[3,7,2]", "f64[3,7,2]", axis=1)],
    "prod": [of("f64[4,5]", axis=0, keepdims=False), of("f64[4,5,3]", axis=1, keepdims=True)],
    "nn.layer_norm": [
        of("f64[4,5,6]", "f64[6]", "f64[6]", axes=(2,), epsilon=1e-5),
        of("f64[5,6]", "f64[5,6]", "f64[5,6]", axes=(0, 1), epsilon=1e-5),
    ],
    **{
        name: [of("f64[4,5]", "f64[4,5]"), of("f64[3,7,2]", "f64[3,7,2]")]
        for name in ("silu_multiply", "gelu_multiply", "gelu_tanh_multiply")
    },
    "rotary": [of("f64[2,3,5,6]", "f64[1,1,5,6]", "f64[2,1,5,6]"), of("f64[3,4]", "f64[4]", "f64[4]")],
    "nn.rms_norm": [
        of("f64[4,5,6]", "f64[5,6]", axes=(1, 2), epsilon=1e-6),
        of("f64[127]", "f64[127]", axes=(0,), epsilon=1e-6),
    ],
    "rms_norm_rounded": [
        of("f64[4,5,6]", "f64[5,6]", axes=(1, 2), epsilon=1e-6),
        of("f64[127]", "f64[127]", axes=(0,), epsilon=1e-6),
    ],
    **{
        f"{name}_grad": [
            of("f64[4,5,6]", "f64[6]", "f64[4,5,6]", axes=(2,), epsilon=1e-5),
            of("f64[5,6]", "f64[5,6]", "f64[5,6]", axes=(0, 1), epsilon=1e-5),
        ]
        for name in ("layer_norm", "rms_norm")
    },
    **{
        f"{name}_weight_grad": [
            of("f64[4,5,6]", "f64[4,5,6]", axes=(2,), epsilon=1e-5, dtype="float64"),
            of("f64[5,6]", "f64[5,6]", axes=(0, 1), epsilon=1e-5, dtype="float64"),
        ]
        for name in ("layer_norm", "rms_norm")
    },
    "nn.scaled_dot_product_attention": [
        of("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", scale=0.5, causal=False, masked=False, boolean=False),
        of("f64[2,4,5,6]", "f64[2,4,5,6]", "f64[2,4,5,6]", scale=0.5, causal=True, masked=False, boolean=False),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,1,5,7]"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "i64[5,2] = 0 3 1 4 2 7 0 7 6 7"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False, "bounded": True},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "i64[2,5,2] = 0 3 1 4 2 7 0 7 6 7 0 1 0 2 2 3 2 4 4 5"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False, "bounded": True},
        ),
    ],
    "attention_part": [
        of("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", scale=0.5, causal=False, masked=False, boolean=False),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,6]", "i64[5,2] = 0 3 1 4 2 2 0 7 6 7"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False, "bounded": True},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,6]", "i64[2,5,2] = 0 3 1 4 2 7 0 7 6 7 0 1 0 2 2 3 2 4 4 5"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False, "bounded": True},
        ),
    ],
    "attention_part_grad": [
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,4,5,3]", "f64[2,4,5,1]", "f64[2,4,5,1]"),
            **{"scale": 0.5, "causal": False, "masked": False, "boolean": False},
        ),
    ],
    "renormalized_rows": [of("f64[6,4]", "i64[5] < 6", most=1.5, order=2.0)],
    "nn.attention_of_states": [
        of(
            *("f64[1,4,2,6]", "f64[1,4,2,6]", "f64[1,2,12]", "f64[1,4,3,6]", "f64[1,3,12]"),
            **{"scale": 0.5, "masked": False, "boolean": False},
            views=((2, (), ()), (1, (1, -1, 4, 3), (0, 2, 1, 3))),
        ),
    ],
    "attention_grad": [
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,4,5,3]"),
            **{"scale": 0.5, "causal": False, "masked": False, "boolean": False},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,4,5,3]", "bool[2,1,5,7]"),
            **{"scale": 0.5, "causal": True, "masked": True, "boolean": True},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,4,5,3]", "i64[5,2] = 0 3 1 4 2 7 0 7 6 7"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False, "bounded": True},
        ),
        of(
            *("f64[2,4,5,6]", "f64[2,4,7,6]", "f64[2,4,7,3]", "f64[2,4,5,3]", "f64[4,5,7]"),
            **{"scale": 0.5, "causal": False, "masked": True, "boolean": False},
        ),
    ],
    "nn.lstm": [
        of(*LSTM_OPERANDS, **LSTM),
        # One more operand at a time: seven of them lie in too many ways.
        of(*LSTM_OPERANDS, "f64[15]", **LSTM | {"extras": ("peepholes",), "reverse": True}),
        of(*LSTM_OPERANDS, "i64[4] < 5", **LSTM | {"extras": ("lengths",), "clip": 0.5}),
        of(
            *("f64[3,4,20]", "f64[20,2]", "f64[4,2]", "f64[4,5]", "f64[2,5]"),
            **LSTM | {"extras": ("projection",)},
        ),
    ],
    "nn.gru": [
        of("f64[3,4,15]", "f64[15,5]", "f64[4,5]", "f64[15]", **GRU | {"extras": ("bias",)}),
        of(
            "f64[3,4,15]", "f64[15,5]", "f64[4,5]", "i32[4] < 5", **GRU | {"reset_after": False, "extras": ("lengths",)}
        ),
    ],
    "nn.rnn": [
        of("f64[3,4,5]", "f64[5,5]", "f64[4,5]", **RECURRENT, activations=("hard_sigmoid",)),
        of("f64[1,7,5]", "f64[5,5]", "f64[7,5]", **RECURRENT | {"reverse": True}, activations=("relu",)),
    ],
    # One hidden unit: operands of more lie in too many ways.
    "nn.recurrence_grad": [of("f64[3,4,1]", "f64[1,1]", "f64[4,1]", "f64[3,4,1]", "f64[4,1]", **RNN)],
    "nn.recurrence_weight_grad": [
        of(
            "f64[3,4,1]",
            "f64[1,1]",
            "f64[4,1]",
            "i64[4] < 5",
            "f64[3,4,1]",
            "f64[4,1]",
            **RNN | {"extras": ("lengths",)},
        ),
    ],
    **{name: [Sample(*one) for one in rows] for name, rows in SPATIAL_SAMPLES.items()},
    "nn.batch_norm": [of("f64[4,5,6]", "f64[5]", "f64[5]", "f64[5]", "f64[5] > 0", epsilon=1e-5)],
    "reshape": [
        of("f64[4,6]", shape=(4, 2, 3)),
        of("f64[4,2,3]", shape=(4, 6)),
        of("f64[4,6]", shape=(24,)),
        of("f64[6,4]", shape=(8, 3)),
        of("f64[4,1,6]", shape=(1, 2, 2, 6)),
    ],
    "call_tir": [of("f64[4,6]", **tir_attrs(4, 6, "float64"))],
    "call_dps_packed": [of("f64[4,6]", **packed_attrs(4, 6, "float64"))],
    "permute_dims": [of("f64[4,5,6]", axes=(2, 0, 1))],
    "repeat_elements": [of("f64[4,3]", axis=1, repeats=(3, 1, 2)), of("i64[5,3]", axis=0, repeats=(1, 2, 1, 1, 4))],
    "broadcast_to": [of("f64[4,1,6]", shape=(3, 4, 5, 6)), of("f64[]", shape=(4,))],
    "keep": [of("f64[4,6]", "f64[4,6]")],
    "shape_ops": [of("f64[4,6]", count=3)],
    "append": [of("f64[4,2,3]", "f64[4,5,3]", axis=1), of("f64[0,3]", "f64[4,3]", axis=0)],
    "concat": [of("f64[4,2,3]", "f64[4,5,3]", axis=1), of("f64[4,3]", "f64[4,3]", "f64[4,3]", axis=0)],
    "split": [of("f64[4,6]", sizes=(2, 2, 2), axis=1), of("f64[4,6]", sizes=(1, 5), axis=1)],
    "strided_slice": [of("f64[4,6,5]", axes=(1,), begin=(1,), end=(6,), strides=(2,))],
    "pad": [of("f64[4,6]", low=(0, 1), high=(0, 2), value=1.5), of("f64[4,5]", low=(2, -1), high=(1, 3), value=0.0)],
    "annotate_sharding": [of("f64[4,6]", placements="S[0]")],
    "redistribute": [of("f64[4,6]", placements="S[0]")],
    "to_place": [of("f64[4,6]", place=1)],
    "restrict": [of("f64[4,6]")],
    "slices": [of("f64[4,9]", dim=1, intervals=((0, 2), (5, 9)))],
    "pad_tail": [
        of("f64[4,6]", dim=1, blocks=2, size=3, padded=5, value=0.0, rank=2, shape=(4, 6)),
        of("f64[4,6]", dim=0, blocks=1, size=4, padded=5, value=0.0, rank=2, shape=(4, 6)),
    ],
    "trim_tail": [of("f64[4,10]", dim=1, blocks=2, size=3, padded=5, value=0.0, rank=2, shape=(4, 10))],
}
