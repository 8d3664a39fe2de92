"""Calls of ATen's recurrent layers and cells, for `aten_calls`."""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _layers(name: str) -> list[Call]:
    """One layer without biases; two layers, both ways, from batches; an LSTM with projections."""
    wide = 7 * _GATES[name]
    once = [f"f64[{wide},5]", f"f64[{wide},7]"]
    biased = [*once, f"f64[{wide}]", f"f64[{wide}]"] * 2
    second = [f"f64[{wide},14]", *biased[1:4]] * 2
    states = {"lstm": ["f64[{0},4,7]", "f64[{0},4,7]"]}.get(name, "f64[{0},4,7]")
    start = [[x.format(n) for x in states] if name == "lstm" else states.format(n) for n in (1, 4)]
    calls = [
        _call("f64[3,4,5]", start[0], once, False, 1, 0.0, False, False, False),
        _call("f64[4,3,5]", start[1], [*biased, *second], True, 2, 0.3, False, True, True),
    ]
    if name == "lstm":
        projected = [once[0], "f64[28,2]", "f64[2,7]"]
        calls.append(_call("f64[3,4,5]", ["f64[1,4,2]", "f64[1,4,7]"], projected, False, 1, 0.0, True, False, False))
    return calls


def _cell(name: str, biased: bool) -> Call:
    wide = 7 * _GATES[name]
    states = ["f64[4,7]", "f64[4,7]"] if name == "lstm" else "f64[4,7]"
    return _call("f64[4,5]", states, f"f64[{wide},5]", f"f64[{wide},7]", *[f"f64[{wide}]"] * (2 if biased else 0))


def _padded(name: str, states: int) -> Call:
    wide = 7 * _GATES[name]
    weights = [f"f64[{wide},5]", f"f64[{wide},7]"]
    lengths = torch.tensor([3, 1, 2, 3])
    return _call(name, "f64[3,4,5]", lengths, ["f64[1,4,7]"] * states, weights, False, 1, 0.0, False, False)


def _call(*args: Any) -> Call:
    return args, {}


CALLS: dict[str, list[Call]] = {
    **{f"{name}.input": _layers(name) for name in _GATES},
    "distir.padded_recurrence.default": [_padded(name, states) for name, states in (("gru", 1), ("lstm", 2))],
    **{f"{name}_cell.default": [_cell(name, True), _cell(name, False)] for name in _GATES},
}
