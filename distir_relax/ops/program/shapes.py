"""Dynamic shapes: shapes as values of the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.table import FREE, Attrs, Code, Semantics, Trait, Types, define


def _partial_eval_shape_of(operands: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    import torch

    return (torch.tensor(operands[0].shape, dtype=torch.int64),)


define(
    "shape_of",
    Semantics(
        infer=lambda types, attrs: (TensorType((len(types[0].shape),), "int64"),),
        torch="torch.tensor({0}.shape, dtype=torch.int64, device={0}.device)",
        partial_eval=_partial_eval_shape_of,
    ),
    cost=FREE,
    code=Code(relax="R.shape_to_tensor(R.shape_of({0}))"),
    traits={Trait.SHAPE},
)


def _infer_dynamic(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    raise ValueError("the shape must be known numbers")


def _partial_eval_reshape(operands: Sequence[Any], attrs: Attrs) -> tuple[Any, ...] | None:
    x, shape = operands
    if isinstance(shape, TensorType):
        return None
    sizes = [int(n) for n in shape]
    product = math.prod(n for n in sizes if n >= 0)
    if sizes.count(-1) > 1 or (product and x.elements % product) or (-1 not in sizes and product != x.elements):
        raise ValueError(f"{x} cannot take the shape {tuple(sizes)}")
    return (TensorType(tuple(n if n >= 0 else x.elements // product for n in sizes), x.dtype),)


define(
    "dynamic_reshape",
    Semantics(infer=_infer_dynamic, torch="{0}.reshape(tuple({1}.tolist()))", partial_eval=_partial_eval_reshape),
    cost=FREE,
    code=Code(relax="R.reshape({0}, R.tensor_to_shape({1}))"),
    traits={Trait.SHAPE, Trait.VIEW},
)
