"""Seeds of what a program draws at random: each op that draws takes one, and the next is derived from it.

The first is the program's input ``seed``. So blocks that a model repeats stay equal: each takes a seed and gives one.
"""

from __future__ import annotations

from distir_relax.errors import ImportModelError
from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import FREE, NO_GRADIENT, Attrs, Builder, Code, Semantics, Split, Types, define

SEED = "seed"
"""The name of the input."""


def fresh_seed(g: Builder) -> Value:
    """The seed of the next op that draws, an int64 scalar; the first declares the program's input ``seed``.

    Raises `ImportModelError` where the model has an input or a weight of that name.
    """
    if g.seed is None:
        g.seed = g.input(SEED, TensorType((), "int64"))
        if g.seed.name != SEED:
            raise ImportModelError(
                f"the model has an input or a weight called {SEED!r}, as the program calls what its dropout draws by",
                hint="give it another name",
            )
    hint, g.hint = g.hint, SEED
    found: Value = g.emit("next_seed", g.seed)
    g.seed, g.hint = found, hint
    return found


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if types[0] != TensorType((), "int64"):
        raise ValueError("a seed, an int64 scalar")
    return (types[0],)


define(
    "next_seed",
    Semantics(infer=_infer, torch="random.next_seed({0})"),
    Split(" -> "),
    cost=FREE,
    code=Code(relax="random.next_seed({0})"),
    gradient=NO_GRADIENT,
)
