"""Ops of programs rather than of models: function calls, streams, and shapes that are numbers of the program itself.

``call @f(x, …) on {4,5}``   runs function `f`, whose devices 0 and 1 are 4 and 5
``wait(x)``                  the same tensor; the device goes on when the stream on which `x` was made has come so far
``shape_of(x)``              the shape of `x`, a vector of int64
``dynamic_reshape(x, s)``    `x` in the shape that the numbers `s` say, -1 standing for what is left
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import CALL, WAIT, TensorType
from distir_relax.ops.communication import no_rule
from distir_relax.ops.registry import Attrs, Cost, Types, define


def _infer_call(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    raise ValueError("what a call gives is decided by its function")


def _same(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (types[0],)


define(CALL, infer=_infer_call, rule=no_rule, torch="{0}", role="call")
define(WAIT, infer=_same, rule=no_rule, torch="{0}", role="wait", trivial=True, cost=Cost(view=True))


def _infer_shape_of(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType((len(types[0].shape),), "int64"),)


def _mixed_shape_of(operands: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    import torch

    return (torch.tensor(operands[0].shape, dtype=torch.int64),)


define(
    "shape_of",
    infer=_infer_shape_of,
    rule=no_rule,
    torch="torch.tensor({0}.shape, dtype=torch.int64)",
    relax="R.shape_to_tensor(R.shape_of({0}))",
    mixed=_mixed_shape_of,
    role="shape",
    flops=lambda types, attrs, results: 0.0,
)


def _infer_dynamic(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    raise ValueError("the shape must be known numbers")


def _mixed_dynamic(operands: Sequence[Any], attrs: Attrs) -> tuple[Any, ...] | None:
    x, shape = operands
    if isinstance(shape, TensorType):
        return None
    sizes = [int(n) for n in shape]
    known = math.prod(n for n in sizes if n >= 0)
    if sizes.count(-1) > 1 or (known and x.elements % known) or (-1 not in sizes and known != x.elements):
        raise ValueError(f"{x} cannot take the shape {tuple(sizes)}")
    return (TensorType(tuple(n if n >= 0 else x.elements // known for n in sizes), x.dtype),)


define(
    "dynamic_reshape",
    infer=_infer_dynamic,
    rule=no_rule,
    torch="{0}.reshape(tuple({1}.tolist()))",
    relax="R.reshape({0}, R.tensor_to_shape({1}))",
    mixed=_mixed_dynamic,
    role="shape",
    flops=lambda types, attrs, results: 0.0,
    cost=Cost(view=True),
)
