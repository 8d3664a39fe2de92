"""Backward steps of recurrences through time (BPTT), for per-sequence operands and for weights.

They are two ops: the batch stays split in the first and is summed over in the second, and weight gradients may be
computed later. Both recompute the recurrence, and take its operands and the gradients of its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Code,
    Cost,
    Gradient,
    Rule,
    Semantics,
    Split,
    Types,
    define,
    parse_rule,
)

STATES = {"lstm": 2, "gru": 1, "rnn": 1}
"""Number of states of each cell."""

_DIMS = {"peepholes": "[k]", "lengths": "n", "projection": "[p] [h]", "bias": "[g]"}
"""The factors of the optional operands."""

_Operands = Callable[[Attrs], tuple[int, ...]]


def state_dims(states: int, attrs: Attrs) -> list[str]:
    """Return the factors of a cell's states."""
    return ["n [p]", "n [h]" if "projection" in attrs["extras"] else "n [p]"][:states]


def operand_dims(states: int, attrs: Attrs) -> list[str]:
    """Return the factors of a cell's operands."""
    return ["[t] n [g]", "[g] [p]", *state_dims(states, attrs), *(_DIMS[extra] for extra in attrs["extras"])]


def cell_gradient(cell: str) -> Gradient:
    """Return the gradient facet of the cell."""

    def back(b: Backward) -> Sequence[Value | None]:
        grads = [b.zeros(y) if g is None else g for y, g in zip(b.op.results, b.grads, strict=True)]
        attrs = {**b.attrs, "cell": cell}
        results: list[Value | None] = [None] * len(b.op.operands)
        for name, indices in (
            ("nn.recurrence_grad", _of_sequences(attrs)),
            ("nn.recurrence_weight_grad", _of_weights(attrs)),
        ):
            if b.wrt.intersection(indices):
                values = b.emit(name, *b.op.operands, *grads, **attrs)
                for i, value in zip(indices, values if isinstance(values, tuple) else (values,), strict=True):
                    results[i] = value
        return results

    return Gradient(all=back)


def _of_sequences(attrs: Attrs) -> tuple[int, ...]:
    """Return the per-sequence operands: gates and states."""
    return (0, *range(2, 2 + STATES[attrs["cell"]]))


def _of_weights(attrs: Attrs) -> tuple[int, ...]:
    fixed = 2 + STATES[attrs["cell"]]
    return (1, *(fixed + i for i, extra in enumerate(attrs["extras"]) if extra != "lengths"))


_SAVED = {"lstm": (5, 8), "gru": (6, 9), "rnn": (2, 2)}
"""For each cell, the number of saved tensors per step in torch's backward by states, and by weights (measured)."""


def _workspace(types: Types, attrs: Attrs, of_weights: bool) -> float:
    """Workspace: copies of the operands, saved tensors of the steps, and accumulated weight gradients."""
    steps = types[0].shape[0] * float(types[2].bytes)
    return sum(t.bytes for t in types) + _SAVED[attrs["cell"]][of_weights] * steps + 1.75 * of_weights * types[1].bytes


def _define(name: str, wrt: _Operands, of_weights: bool) -> None:
    """Define an op that returns the gradients of the operands `wrt`, by index."""

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        states = STATES[attrs["cell"]]
        operands = types[: 2 + states + len(attrs["extras"])]
        results = (
            TensorType((*operands[0].shape[:2], operands[2].shape[1]), operands[0].dtype),
            *operands[2 : 2 + states],
        )
        if tuple(types[len(operands) :]) != results:
            raise ValueError(f"expected the operands of {attrs['cell']}, and gradients {', '.join(map(str, results))}")
        return tuple(operands[i] for i in wrt(attrs))

    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        states = STATES[attrs["cell"]]
        operand_names = operand_dims(states, attrs)
        result_names = ", ".join(operand_names[i] for i in wrt(attrs))
        text = f"{', '.join([*operand_names, '[t] n [p]', *state_dims(states, attrs)])} -> {result_names}"
        return parse_rule(text, [t.shape for t in types], [t.shape for t in results])

    def expression(attrs: Attrs) -> str:
        named = [f"{key}={{{key}}}" for key in sorted(attrs) if key != "clip"]
        named += ["clip={clip}"] if attrs["clip"] != math.inf else []
        return f"recurrent.gradients({{*}}, wanted={wrt(attrs)}, {', '.join(named)})"

    define(
        name,
        Semantics(
            infer=infer,
            torch=expression,
            linear=lambda count, attrs: (frozenset(range(count - 1 - STATES[attrs["cell"]], count)),),
            attributes={"cell": f"one of {', '.join(STATES)}", "extras": "the names of the operands after the states"},
        ),
        Split(rule),
        cost=Cost(
            flops=lambda types, attrs, results: 6.0 * types[0].elements * types[1].shape[1],
            workspace=lambda types, attrs, results: _workspace(types, attrs, of_weights),
        ),
        code=Code(relax=expression),
    )


_define("nn.recurrence_grad", _of_sequences, False)
_define("nn.recurrence_weight_grad", _of_weights, True)
