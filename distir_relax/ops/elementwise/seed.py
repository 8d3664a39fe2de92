"""Seeds of random ops: each takes one, and the next is derived from it.

The first is the program's input ``seed``. Since each block takes a seed and returns one, repeated blocks stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distir_relax.errors import ImportModelError
from distir_relax.ir import Function, TensorType, Value
from distir_relax.ops.table import FREE, NO_GRADIENT, Attrs, Builder, Code, Semantics, Split, Types, define

SEED = "seed"
"""The name of the input."""


def takes_seed(function: Function) -> bool:
    """Return whether a program draws random numbers, and so has the input."""
    return any(item.value.name == SEED for item in function.inputs)


def next_seed(g: Builder) -> Value:
    """Return the seed of the next random op, an int64 scalar; the first declares the program's input ``seed``.

    Raises `ImportModelError` if the model has an input or a weight of that name.
    """
    if g.seed is None:
        g.seed = g.input(SEED, TensorType((), "int64"))
        if g.seed.name != SEED:
            raise ImportModelError(
                f"the model has an input or a weight called {SEED!r}, the name of the input that seeds dropout",
                hint="give it another name",
            )
    hint, g.hint = g.hint, SEED
    seed: Value = g.emit("next_seed", g.seed)
    g.seed, g.hint = seed, hint
    return seed


def element_positions(g: Builder, shape: Sequence[int]) -> list[Value]:
    """Return for each dim of a tensor of `shape` the position offsets of its elements, int64.

    Split like the dim, they give a device the global positions of its elements.
    """
    hint, g.hint = g.hint, "places"
    places = []
    for d, count in enumerate(shape):
        step = math.prod(shape[d + 1 :])
        places.append(g.emit("arange", start=0, end=count * step, stride=step, dtype="int64"))
    g.hint = hint
    return places


def check_positions(seed: TensorType, places: Sequence[TensorType], shape: Sequence[int]) -> None:
    """Raise ValueError unless these are the types of a seed and of the positions of a tensor of `shape`."""
    if seed != TensorType((), "int64") or list(places) != [TensorType((n,), "int64") for n in shape]:
        raise ValueError("expected a seed, an int64 scalar, and an int64 vector of positions for each dim")


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if types[0] != TensorType((), "int64"):
        raise ValueError("expected a seed, an int64 scalar")
    return (types[0],)


define(
    "next_seed",
    Semantics(infer=_infer, torch="random.next_seed({0})"),
    Split(" -> "),
    cost=FREE,
    code=Code(relax="random.next_seed({0})"),
    gradient=NO_GRADIENT,
)
