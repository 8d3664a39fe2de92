"""Uniform random numbers in [0, 1), by seed and position as in dropout, and distributions derived from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.elementwise.seed import check_positions, element_positions, next_seed
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
    flops_per_result,
    parse_rule,
)


def _draw_uniform(g: Builder, shape: Sequence[int], dtype: str) -> Any:
    """Return uniform numbers of a floating dtype; raise NotImplementedError unless the program is for training."""
    if 0 in shape:
        return filled(g, shape, 0.0, dtype)
    if not g.training:
        raise NotImplementedError("it draws random numbers, which only programs for training may do")
    return g.emit("uniform", next_seed(g), *element_positions(g, shape), dtype=dtype)


def _draw_normal(g: Builder, shape: Sequence[int], dtype: str) -> Any:
    """Return standard normal numbers, each from two uniform ones (Box and Muller, 1958)."""
    wide = "float64" if dtype == "float64" else "float32"
    squared = g.emit("multiply", _draw_exponential(g, shape, wide), g.constant(2.0, wide))
    angle = g.emit("multiply", _draw_uniform(g, shape, wide), g.constant(2 * math.pi, wide))
    return cast(g, g.emit("multiply", g.emit("sqrt", squared), g.emit("cos", angle)), dtype)


def _draw_exponential(g: Builder, shape: Sequence[int], dtype: str) -> Any:
    """Return exponential numbers of mean 1, without a logarithm of zero."""
    rest = g.emit("subtract", g.constant(1.0, dtype), _draw_uniform(g, shape, dtype))
    return g.emit("negative", g.emit("log", rest))


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    seed, *places = types
    shape = tuple(place.shape[0] for place in places if place.shape)
    check_positions(seed, places, shape)
    if "float" not in attrs["dtype"]:
        raise ValueError("expected a dtype of floats")
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
    cost=Cost(flops=flops_per_result(12.0)),
    code=Code(relax="random.uniform({*}, dtype={dtype})"),
    gradient=NO_GRADIENT,
)


# ATen spellings


def _register_draw(name: str, draw: Any) -> None:
    def of_shape(g: Builder, shape: Sequence[int], *, dtype: Any = None) -> Any:
        return draw(g, shape, dtype_name(dtype) if dtype else g.default_dtype)

    def like(g: Builder, x: Value, *, dtype: Any = None) -> Any:
        return draw(g, x.tensor.shape, dtype_name(dtype or x.tensor.dtype))

    aten(f"{name}.default")(of_shape)
    aten(f"{name}_like.default")(like)


_register_draw("rand", _draw_uniform)
_register_draw("randn", _draw_normal)


@aten("uniform_.default")
def _uniform(g: Builder, x: Value, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    return _scaled_draw(g, x, _draw_uniform, low, high - low, generator)


@aten("normal_.default")
def _normal_of(g: Builder, x: Value, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    return _scaled_draw(g, x, _draw_normal, mean, std, generator)


@aten("exponential_.default")
def _exponential_of(g: Builder, x: Value, rate: float = 1.0, *, generator: Any = None) -> Any:
    return _scaled_draw(g, x, _draw_exponential, 0.0, 1 / rate, generator)


def _scaled_draw(g: Builder, x: Value, draw: Any, start: float, scale: float, generator: Any) -> Any:
    """Return random numbers in the shape and dtype of `x`, times `scale`, plus `start`."""
    _reject_generator(generator)
    numbers, dtype = draw(g, x.tensor.shape, x.tensor.dtype), x.tensor.dtype
    return g.emit("add", g.emit("multiply", numbers, g.constant(scale, dtype)), g.constant(start, dtype))


def _reject_generator(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError("it draws random numbers from a generator of the model")


@aten("bernoulli.p", "bernoulli_.float")
def _bernoulli(g: Builder, x: Value, p: float = 0.5, *, generator: Any = None) -> Any:
    """Return ones with probability `p`, as in stochastic depth."""
    _reject_generator(generator)
    if p in (0, 1):
        return filled(g, x.tensor.shape, p, x.tensor.dtype)
    ones = g.emit("less", _draw_uniform(g, x.tensor.shape, "float32"), g.constant(p, "float32"))
    return cast(g, ones, x.tensor.dtype)
