"""The entries ``nn.lstm``, ``nn.gru`` and ``nn.rnn``: one direction of one layer, over all time steps.

The contribution of the input to the gates is computed beforehand, for all steps at once, by an ordinary product whose
factors split. See `distir_relax.kernels.recurrent` for operands and attributes. Optional operands follow the others,
and attribute ``extras`` names them. The batch splits; each step depends on the previous one and on all hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops.recurrence.gradients import cell_gradient, operand_dims, state_dims
from distir_relax.ops.table import (
    Attrs,
    Code,
    Cost,
    IncrementalForm,
    IncrementalStep,
    Rule,
    Semantics,
    Split,
    Types,
    define,
    parse_rule,
)


def _define(name: str, gates: int, states: int, extras: Sequence[str], options: Sequence[str]) -> None:
    """Define a cell with this number of gates and states; `options` are the attributes that its kernel takes."""
    cell = name.removeprefix("nn.")
    fixed = 2 + states

    def expression(attrs: Attrs) -> str:
        positional = [f"{{{i}}}" for i in range(fixed)]
        named = [f"{option}={{{option}}}" for option in (*options, "activations")]
        named += ["clip={clip}"] if attrs["clip"] != math.inf else []
        named += ["reverse=True"] if attrs["reverse"] else []
        named += [f"{extra}={{{fixed + i}}}" for i, extra in enumerate(attrs["extras"])]
        return f"recurrent.{cell}({', '.join([*positional, *named])})"

    define(
        name,
        Semantics(infer=_infer(gates, states, extras), torch=expression),
        Split(_rule(states)),
        cost=Cost(flops=_flops, product=_product, workspace=_workspace),
        code=Code(relax=expression),
        gradient=cell_gradient(cell),
        incremental=_continuation(name, states),
    )


def _continuation(name: str, states: int) -> IncrementalForm:
    def dims(op: Op) -> tuple[int, ...]:
        return () if op.attrs["reverse"] or "lengths" in op.attrs["extras"] else (0,)  # type: ignore[operator]

    def compute(step: IncrementalStep) -> tuple[Value, ...]:
        """Begin with the last states. States are zero before the first call: they are differences to the initial."""
        gates, weight, *others = step.operands
        initial, extras = others[:states], others[states:]
        past = [step.state(value.tensor, "hidden") for value in initial]
        begin = [step.emit("add", value, change) for value, change in zip(initial, past, strict=True)]
        results: tuple[Value, ...] = step.emit(name, gates, weight, *begin, *extras, **step.attrs)
        for state, value, last in zip(past, initial, results[1:], strict=True):
            step.keep(state, step.emit("subtract", last, value))
        return results

    return IncrementalForm(dims=dims, compute=compute, carries=True)


def _infer(gates: int, states: int, allowed: Sequence[str]) -> Callable[[Types, Attrs], tuple[TensorType, ...]]:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (steps, batch, width), (rows, size) = types[0].shape, types[1].shape
        hidden, dtype = width // gates, types[0].dtype
        shapes = {"peepholes": (3 * hidden,), "lengths": (batch,), "projection": (size, hidden), "bias": (width,)}
        extras = attrs["extras"]
        expected = [(steps, batch, gates * hidden), (width, size), (batch, size), (batch, hidden)][: 2 + states]
        expected += [shapes[extra] for extra in extras]
        if not set(extras) <= set(allowed) or [t.shape for t in types] != expected or rows != width:
            raise ValueError(
                f"expected gates (t, n, {gates} h), weight ({gates} h, h), states (n, h), then {extras or 'nothing'}"
            )
        names = [""] * (2 + states) + list(extras)
        if any(t.dtype != dtype for t, name in zip(types, names, strict=True) if name != "lengths"):
            raise ValueError(f"expected operands of {dtype}")
        if "projection" not in extras and size != hidden:
            raise ValueError(f"a weight for a state of {size} where {hidden} units are hidden")
        return (TensorType((steps, batch, size), dtype), *types[2 : 2 + states])

    return infer


def _rule(states: int) -> Callable[[Types, Attrs, Types], Rule]:
    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        right = ", ".join(["[t] n [p]", *state_dims(states, attrs)])
        text = f"{', '.join(operand_dims(states, attrs))} -> {right}"
        return parse_rule(text, [t.shape for t in types], [t.shape for t in results])

    return rule


def _workspace(types: Types, attrs: Attrs, results: Types) -> float:
    """Workspace: the outputs of all steps except the last, before concatenation."""
    return float(max(results[0].bytes - results[1].bytes, 0))


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * types[0].elements * types[1].shape[1]


def _product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    steps, batch, width = types[0].shape
    return steps, batch, width, types[1].shape[1]


_define("nn.lstm", 4, 2, ("peepholes", "lengths", "projection"), ("order",))
_define("nn.gru", 3, 1, ("bias", "lengths"), ("order", "reset_after"))
_define("nn.rnn", 1, 1, ("lengths",), ())
