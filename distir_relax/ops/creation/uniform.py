"""Numbers drawn uniformly from 0 up to 1, by a seed and by position, as dropout draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.elementwise.seed import check_places, fresh_seed, places_of
from distir_relax.ops.table import (
    NO_GRADIENT,
    Attrs,
    Builder,
    Code,
    Cost,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    cast,
    define,
    dim_names,
    dtype_name,
    filled,
    parse_rule,
)


def _drawn(g: Builder, shape: Sequence[int], dtype: str) -> Any:
    """Numbers of a floating dtype; raises NotImplementedError unless the program is one that is trained."""
    if 0 in shape:
        return filled(g, shape, 0.0, dtype)
    if not g.training:
        raise NotImplementedError("it draws random numbers, which a program that is not trained cannot do")
    return g.emit("uniform", fresh_seed(g), *places_of(g, shape), dtype=dtype)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    seed, *places = types
    shape = tuple(place.shape[0] for place in places if place.shape)
    check_places(seed, places, shape)
    if "float" not in attrs["dtype"]:
        raise ValueError("a dtype of floats")
    return (TensorType(shape, attrs["dtype"]),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types) - 1)
    return parse_rule(f"{', '.join(['', *names])} -> {' '.join(names)}", [t.shape for t in types], [results[0].shape])


define(
    "uniform",
    Semantics(
        infer=_infer,
        torch="random.uniform({*}, dtype={dtype})",
        attributes={"dtype": "the dtype of the numbers, floats"},
    ),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: 12.0 * results[0].elements),
    code=Code(relax="random.uniform({*}, dtype={dtype})"),
    gradient=NO_GRADIENT,
)


# ATen spellings


@aten("rand.default")
def _rand(g: Builder, shape: Sequence[int], *, dtype: Any = None) -> Any:
    import torch

    return _drawn(g, shape, dtype_name(dtype or torch.get_default_dtype()))


@aten("rand_like.default")
def _rand_like(g: Builder, x: Value, *, dtype: Any = None) -> Any:
    return _drawn(g, x.tensor.shape, dtype_name(dtype or x.tensor.dtype))


@aten("bernoulli.p", "bernoulli_.float")
def _bernoulli(g: Builder, x: Value, p: float = 0.5, *, generator: Any = None) -> Any:
    """Ones at the rate `p`, as stochastic depth draws them."""
    if generator is not None:
        raise NotImplementedError("it draws random numbers by a generator of the model's own")
    if p in (0, 1):
        return filled(g, x.tensor.shape, p, x.tensor.dtype)
    ones = g.emit("less", _drawn(g, x.tensor.shape, "float32"), g.constant(p, "float32"))
    return cast(g, ones, x.tensor.dtype)
