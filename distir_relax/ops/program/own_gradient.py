"""Results whose gradient a model computes itself, by a `torch.autograd.Function`.

``own_gradient(y, seed, x, dx, ...)`` is `y`, and each `x`. `seed` stands for the gradient of `y`, and each `dx`, which
is computed from it, for that of the `x` before it. `autodiff` repeats the ops from the seed to a `dx` with the gradient
that it has, and then leaves the op out.
"""

from __future__ import annotations

from distir_relax.ops.table import FREE, NO_GRADIENT, Attrs, Rule, Semantics, Split, Trait, Types, define, parse_rule


def _rule(operands: Types, attrs: Attrs, results: Types) -> Rule:
    """The dims of two operands that stand for each other, and of their result, are the same."""
    tensors = [" ".join(f"d{number}_{dim}" for dim in range(len(t.shape))) for number, t in enumerate(results)]
    pairs = [text for text in tensors for _ in range(2)]
    text = f"{', '.join(pairs)} -> {', '.join(tensors)}"
    return parse_rule(text, [t.shape for t in operands], [t.shape for t in results])


define(
    "own_gradient",
    Semantics(
        infer=lambda types, attrs: tuple(types[::2]),
        torch=lambda attrs: f"({', '.join(f'{{{i}}}' for i in range(2 * attrs['inputs'] + 2))})[::2]",
        attributes={"inputs": "the number of inputs with a gradient"},
    ),
    Split(_rule),
    cost=FREE,
    gradient=NO_GRADIENT,
    traits={Trait.OWN_GRADIENT},
)
