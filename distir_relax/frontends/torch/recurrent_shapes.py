"""Shapes of recurrent layers during export: torch itself runs all steps of a traced layer, so its length is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from distir_relax.support.torch_compat import decomposed_as


@contextmanager
def open_recurrence_lengths() -> Iterator[None]:
    """Let `torch.export` trace LSTM, GRU and RNN layers for any length of their input within the context."""
    import torch

    aten = torch.ops.aten
    with ExitStack() as stack:
        stack.enter_context(decomposed_as(aten.lstm.input, _lstm))
        for op in (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
            stack.enter_context(decomposed_as(op, _one_state))
        yield


def _lstm(x: Any, states: Any, params: Any, *options: Any) -> Any:
    return _outputs(x, states[0], options), *(state.new_empty(state.shape) for state in states)


def _one_state(x: Any, state: Any, params: Any, *options: Any) -> Any:
    return _outputs(x, state, options), state.new_empty(state.shape)


def _outputs(x: Any, hidden: Any, options: Any) -> Any:
    """Return the outputs, (t, n, h) or (n, t, h): `options` end with those of both directions and of the order."""
    is_bidirectional = options[4]
    return x.new_empty((*x.shape[:2], hidden.shape[2] * (2 if is_bidirectional else 1)))
