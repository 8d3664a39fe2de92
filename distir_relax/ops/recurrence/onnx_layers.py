"""ONNX's recurrent layers: one layer, forward, reverse or bidirectional (operators LSTM, GRU, RNN)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.recurrent import ACTIVATIONS
from distir_relax.ops.recurrence.layers import Cell, direction, stack_directions
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, filled, onnx

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@onnx("LSTM")
def _onnx_lstm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    if attrs.get("input_forget", 0):
        raise NotImplementedError("an input gate coupled with the forget gate (input_forget)")
    return _layer(g, Cell("nn.lstm", {"order": "iofc"}), ("sigmoid", "tanh", "tanh"), x, attrs)


@onnx("GRU")
def _onnx_gru(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    cell = Cell("nn.gru", {"order": "zrn", "reset_after": bool(attrs.get("linear_before_reset", 0))})
    return _layer(g, cell, ("sigmoid", "tanh"), x, attrs)


@onnx("RNN")
def _onnx_rnn(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _layer(g, Cell("nn.rnn", {}), ("tanh",), x, attrs)


def _layer(g: Builder, cell: Cell, usual: tuple[str, ...], x: OnnxOperands, attrs: Attrs) -> Any:
    directions = _DIRECTIONS[attrs.get("direction", "forward")]
    activations = _activations(attrs, usual * len(directions))
    batch_first = bool(attrs.get("layout", 0))
    sequence = g.emit("permute_dims", x[0], axes=(1, 0, 2)) if batch_first else x[0]
    hidden = x[2].tensor.shape[2]
    start = (sequence.tensor.shape[1], hidden)
    # An LSTM has the states at 5 and 6, and peepholes at 7.
    states = 2 if cell.op == "nn.lstm" else 1
    outputs = []
    for index, reverse in enumerate(directions):
        mine = cell.attrs | {"activations": activations[index * len(usual) : (index + 1) * len(usual)]}
        biases = (
            g.emit("split", _pick(g, x[3], index), sizes=(x[3].tensor.shape[1] // 2,) * 2, axis=0) if x.has(3) else ()
        )
        weights = [_pick(g, x[1], index), _pick(g, x[2], index), *(biases or (None, None))]
        initial = [_state(g, x, 5 + i, index, batch_first, start) for i in range(states)]
        extras = {"lengths": x[4] if x.has(4) else None}
        if x.has(7):
            extras = {"peepholes": _pick(g, x[7], index), **extras}
        bound = attrs.get("clip", math.inf)
        outputs.append(
            direction(g, Cell(cell.op, mine), sequence, weights, initial, reverse=reverse, clip=bound, **extras)
        )
    return _joined(g, list(zip(*outputs, strict=True)), batch_first)


def _joined(g: Builder, parts: Sequence[Sequence[Value]], batch_first: bool) -> Any:
    """Return (d, t, n, h) and (d, n, h) in ONNX's order of dims: (t, d, n, h) and (d, n, h), or n first."""
    outputs, *last = (stack_directions(g, values) for values in parts)
    if batch_first:
        return (
            g.emit("permute_dims", outputs, axes=(2, 1, 0, 3)),
            *(g.emit("permute_dims", state, axes=(1, 0, 2)) for state in last),
        )
    return (g.emit("permute_dims", outputs, axes=(1, 0, 2, 3)), *last)


def _pick(g: Builder, x: Value, index: int) -> Any:
    return g.aten("select.int", x, 0, index)


def _state(g: Builder, x: OnnxOperands, operand: int, index: int, batch_first: bool, shape: tuple[int, int]) -> Any:
    if not x.has(operand):
        return filled(g, shape, 0.0, x[0].tensor.dtype)
    return g.aten("select.int", x[operand], 1 if batch_first else 0, index)


def _activations(attrs: Attrs, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the activations of all directions. Raises NotImplementedError for one that cells do not support."""
    named = [name.decode() for name in attrs.get("activations", ())]
    spelled = {name.replace("_", ""): name for name in ACTIVATIONS}
    if lacking := [name for name in named if name.lower() not in spelled]:
        raise NotImplementedError(f"the activation {lacking[0]}")
    # Both lists only cover the activations that have such a parameter.
    for key, expected in (("activation_alpha", 0.2), ("activation_beta", 0.5)):
        if other := [number for number in attrs.get(key, ()) if not math.isclose(number, expected, rel_tol=1e-6)]:
            raise NotImplementedError(f"{key} of {other[0]:g}, expected {expected}")
    return tuple(spelled[name.lower()] for name in named) or usual
