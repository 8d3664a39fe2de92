"""torch's recurrent layers: several layers, uni- or bidirectional; and single cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from distir_relax.ir import Attribute, Value
from distir_relax.ops.table import Builder, aten, reshape_to


class Cell(NamedTuple):
    """An entry of this family, its order of gates, and its attributes."""

    op: str
    attrs: dict[str, Attribute]


def torch_cell(name: str) -> Cell:
    """Return the cell of torch's `name`: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    if name == "lstm":
        return Cell("nn.lstm", {"order": "ifco", "activations": ("sigmoid", "tanh", "tanh")})
    if name == "gru":
        return Cell("nn.gru", {"order": "rzn", "activations": ("sigmoid", "tanh"), "reset_after": True})
    return Cell("nn.rnn", {"activations": (name.removeprefix("rnn_"),)})


def direction(
    g: Builder,
    cell: Cell,
    x: Value,
    weights: Sequence[Any],
    states: Sequence[Any],
    *,
    reverse: bool = False,
    clip: float = math.inf,
    **extras: Any,
) -> Any:
    """Emit one direction of one layer: outputs (t, n, p), then the final states (n, p) or (n, h).

    `x` is (t, n, i); `weights` are those of the input (G h, i) and of the state (G h, p), and their biases (G h) or
    None. `extras` are the optional operands by name, None if omitted.
    """
    of_input, of_state, input_bias, state_bias = weights
    gates = g.emit("linear", x, of_input)
    if cell.attrs.get("reset_after"):
        # The reset gate scales the state's contribution to the new state, including its bias.
        extras["bias"], state_bias = state_bias, None
    biases = [bias for bias in (input_bias, state_bias) if bias is not None]
    if biases:
        gates = g.emit("add", gates, biases[0] if len(biases) == 1 else g.emit("add", *biases))
    present = {name: value for name, value in extras.items() if value is not None}
    return g.emit(
        cell.op, gates, of_state, *states, *present.values(),
        **cell.attrs, clip=clip, reverse=reverse, extras=tuple(present),
    )  # fmt: skip


def join(g: Builder, parts: Sequence[Any], axis: int) -> Any:
    """Concatenate `parts` along `axis`."""
    return parts[0] if len(parts) == 1 else g.emit("concat", *parts, axis=axis)


def stack_directions(g: Builder, parts: Sequence[Any]) -> Any:
    """Stack `parts` along a new first dim."""
    return join(g, [reshape_to(g, part, (1, *part.tensor.shape)) for part in parts], 0)


def _layers(
    g: Builder, name: str, x: Value, states: Sequence[Any], params: Sequence[Any], biased: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool = False, lengths: Value | None = None,
) -> Any:  # fmt: skip
    cell, directions = torch_cell(name), 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    if batch_first:
        x = g.emit("permute_dims", x, axes=(1, 0, 2))
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        outputs = []
        for index in range(directions):
            number = layer * directions + index
            cell_params = list(params[number * each : (number + 1) * each])
            extras: dict[str, Any] = {"lengths": lengths}
            if each not in (2, 4):
                extras["projection"] = cell_params.pop()
            weights = cell_params if biased else [*cell_params, None, None]
            start = [g.aten("select.int", state, 0, number) for state in states]
            results = direction(g, cell, x, weights, start, reverse=index == 1, **extras)
            outputs.append(results[0])
            for final_states, state in zip(last, results[1:], strict=True):
                final_states.append(state)
        x = join(g, outputs, 2)
        if layer < layers - 1:
            x = g.aten("dropout.default", x, dropout, train)
    if batch_first:
        x = g.emit("permute_dims", x, axes=(1, 0, 2))
    return (x, *(stack_directions(g, parts) for parts in last))


# ATen spellings


def _register(name: str) -> None:
    """Register the layers and the cell of a kind. Only an LSTM has two states, as a sequence."""

    @aten(f"{name}.input")
    def layers(g: Builder, x: Value, state: Any, params: Sequence[Any], *options: Any) -> Any:
        return _layers(g, name, x, state if name == "lstm" else [state], params, *options)

    @aten(f"{name}_cell.default")
    def cell(g: Builder, x: Value, state: Any, *weights: Any) -> Any:
        states, missing = state if name == "lstm" else [state], [None] * (4 - len(weights))
        sequence = reshape_to(g, x, (1, *x.tensor.shape))
        _, *results = direction(g, torch_cell(name), sequence, [*weights, *missing], states)
        return tuple(results) if name == "lstm" else results[0]


@aten("distir.padded_recurrence.default")
def _padded_recurrence(
    g: Builder, name: str, x: Value, lengths: Value, states: Sequence[Any], params: Sequence[Any], biased: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """Emit the layers of a packed sequence, which is padded to (t, n, i), with its lengths (n)."""
    return list(_layers(g, name, x, states, params, biased, layers, dropout, train, bidirectional, lengths=lengths))


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _register(_name)
