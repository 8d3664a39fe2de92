"""Recurrent cells over the steps of a sequence: one direction of one layer, given the gates' input projections.

A cell is defined once, over an `Arithmetic`: torch here, Relax in `distir_relax.lowering.emit.relax_recurrent`. For
`t` steps, a batch of `n` and `h` hidden units::

    gates (t, n, G h)   weight (G h, p)   state (n, p)   ->   outputs (t, n, p), last state (n, p)

`G` is the number of gates; `order` names them in the order of `gates` and `weight`. `p` is `h` except for an LSTM with
a projection. With `lengths` (n), a sequence ends at step `lengths[i]`: after that its state is unchanged, and its
outputs are zero. With `reverse` steps run from last to first; outputs keep their positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

State = tuple[Any, ...]


class Arithmetic(Protocol):
    """The operations of cells, besides ``+``, ``-`` and ``*``."""

    def steps(self, x: Any) -> Sequence[Any]:
        """Split the first dim into its elements."""

    def affine(self, x: Any, h: Any, weight: Any) -> Any:
        """Compute ``x + h weight^T``."""

    def product(self, h: Any, weight: Any) -> Any:
        """Compute ``h weight^T``."""

    def split(self, x: Any, parts: int, axis: int = -1) -> Sequence[Any]:
        """Split dim `axis` into equal parts."""

    def activation(self, name: str, x: Any) -> Any:
        """Apply one of `ACTIVATIONS` to `x`."""

    def clip(self, x: Any, bound: float) -> Any:
        """Clamp `x` between ``-bound`` and `bound`."""

    def running(self, lengths: Any, t: int) -> Any:
        """Return which sequences have a step `t`, as a boolean (n, 1)."""

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """Select `a` where the condition holds, else `b`; zero if `b` is None."""

    def bind(self, x: Any) -> Any:
        """Bind `x` to a variable, so that it is computed once."""

    def stack(self, outputs: Sequence[Any], like: Any) -> Any:
        """Stack the outputs of all steps; if there are none, return an empty tensor with rows as `like`."""


ACTIVATIONS = ("sigmoid", "tanh", "relu", "hard_sigmoid")
"""``hard_sigmoid`` is ``clip(0.2 x + 0.5, 0, 1)``."""


class _Torch:
    """Torch's arithmetic."""

    def steps(self, x: Any) -> Sequence[Any]:
        result: Sequence[Any] = x.unbind(0)
        return result

    def affine(self, x: Any, h: Any, weight: Any) -> Any:
        return x.addmm(h, weight.t())

    def product(self, h: Any, weight: Any) -> Any:
        return h @ weight.t()

    def split(self, x: Any, parts: int, axis: int = -1) -> Sequence[Any]:
        result: Sequence[Any] = x.chunk(parts, axis)
        return result

    def activation(self, name: str, x: Any) -> Any:
        return (x * 0.2 + 0.5).clamp(0, 1) if name == "hard_sigmoid" else getattr(x, name)()

    def clip(self, x: Any, bound: float) -> Any:
        return x.clamp(-bound, bound)

    def running(self, lengths: Any, t: int) -> Any:
        return (lengths > t).unsqueeze(-1)

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return a.where(condition, a.new_zeros(()) if b is None else b)

    def bind(self, x: Any) -> Any:
        return x

    def stack(self, outputs: Sequence[Any], like: Any) -> Any:
        import torch

        return torch.stack(list(outputs)) if outputs else like.new_empty(0, *like.shape)


TORCH = _Torch()


def lstm(
    gates: Any,
    weight: Any,
    h: Any,
    c: Any,
    *,
    order: str,
    activations: Sequence[str] = ("sigmoid", "tanh", "tanh"),
    clip: float = math.inf,
    reverse: bool = False,
    peepholes: Any = None,
    lengths: Any = None,
    projection: Any = None,
    ops: Arithmetic = TORCH,
) -> State:
    """Long short-term memory: outputs, last hidden state, last cell state (n, h).

    `order` is of the gates ``i`` (input), ``f`` (forget), ``c`` (cell), ``o`` (output). `activations` are those of the
    gates, the cell's input and its output; the arguments of the first two are clipped, as in ONNX Runtime. `peepholes`
    (3 h) weigh the cell state in the input, output and forget gates, in this order. `projection` (p, h) maps the output
    to a smaller size.
    """
    inner, middle, outer = activations
    bounded = _clipper(clip, ops)
    peeps = dict(zip("iof", ops.split(peepholes, 3), strict=True)) if peepholes is not None else {}

    def gate_value(parts: dict[str, Any], gate: str, cell: Any) -> Any:
        x = parts[gate] + peeps[gate] * cell if peeps else parts[gate]
        return ops.activation(inner, bounded(x))

    def step(x: Any, state: State) -> State:
        hidden, cell = state
        parts = dict(zip(order, ops.split(ops.affine(x, hidden, weight), 4), strict=True))
        retained = gate_value(parts, "f", cell) * cell
        cell = ops.bind(retained + gate_value(parts, "i", cell) * ops.activation(middle, bounded(parts["c"])))
        hidden = ops.bind(gate_value(parts, "o", cell) * ops.activation(outer, cell))
        return (hidden if projection is None else ops.bind(ops.product(hidden, projection))), cell

    return _run(gates, (h, c), step, lengths, reverse, ops)


def gru(
    gates: Any,
    weight: Any,
    h: Any,
    *,
    order: str,
    activations: Sequence[str] = ("sigmoid", "tanh"),
    clip: float = math.inf,
    reverse: bool = False,
    reset_after: bool = True,
    bias: Any = None,
    lengths: Any = None,
    ops: Arithmetic = TORCH,
) -> State:
    """Gated recurrent unit: outputs and last state.

    `order` is of the gates ``r`` (reset), ``z`` (update) and ``n`` (new). With `reset_after` the reset gate scales the
    product of state and weight, to which `bias` (3 h) has been added; else it scales the state.
    """
    inner, outer = activations
    bounded = _clipper(clip, ops)

    def step(x: Any, state: State) -> State:
        (hidden,) = state
        input_parts = dict(zip(order, ops.split(x, 3), strict=True))
        product = ops.product(hidden, weight)
        state_parts = dict(zip(order, ops.split(product if bias is None else product + bias, 3), strict=True))
        reset, update = (ops.activation(inner, bounded(input_parts[gate] + state_parts[gate])) for gate in "rz")
        candidate = reset * state_parts["n"] if reset_after else ops.product(ops.bind(reset * hidden), rows["n"])
        new = ops.activation(outer, bounded(input_parts["n"] + candidate))
        return (ops.bind(new + update * (hidden - new)),)

    rows = {} if reset_after else dict(zip(order, ops.split(weight, 3, 0), strict=True))
    return _run(gates, (h,), step, lengths, reverse, ops)


def rnn(
    gates: Any,
    weight: Any,
    h: Any,
    *,
    activations: Sequence[str] = ("tanh",),
    clip: float = math.inf,
    reverse: bool = False,
    lengths: Any = None,
    ops: Arithmetic = TORCH,
) -> State:
    """Plain recurrence ``state = activation(gates[t] + state weight^T)``: outputs and last state."""
    bounded = _clipper(clip, ops)

    def step(x: Any, state: State) -> State:
        return (ops.activation(activations[0], bounded(ops.affine(x, state[0], weight))),)

    return _run(gates, (h,), step, lengths, reverse, ops)


def gradients(*operands: Any, cell: str, wanted: Sequence[int], extras: Sequence[str], **options: Any) -> Any:
    """Return the gradients of the operands `wanted` of a cell (``lstm``, ``gru``, ``rnn``), by backpropagation in time.

    Returns a tensor if there is one, else a tuple. `operands` are the cell's, of which `extras` names the optional
    ones, followed by the gradients of its results. The forward is recomputed by torch autograd.
    """
    import torch

    run, states = _CELLS[cell]
    fixed = 2 + states
    # Ranks run in inference mode, whose tensors autograd cannot use: clone them outside of it.
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [x.clone() for x in operands]
        inputs, seeds = inputs[: fixed + len(extras)], inputs[fixed + len(extras) :]
        sources = [inputs[i].requires_grad_() for i in wanted]
        results = run(*inputs[:fixed], **dict(zip(extras, inputs[fixed:], strict=True)), **options)
        # Without steps or sequences, results do not depend on all operands.
        pairs = [(y, g) for y, g in zip(results, seeds, strict=True) if y.requires_grad]
        grads = torch.autograd.grad(
            [y for y, _ in pairs], sources, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )
    results = tuple(x.detach() for x in grads)
    return results if len(results) > 1 else results[0]


_CELLS: dict[str, tuple[Callable[..., State], int]] = {"lstm": (lstm, 2), "gru": (gru, 1), "rnn": (rnn, 1)}
"""Each cell, and its number of states."""


def _run(
    gates: Any, state: State, step: Callable[[Any, State], State], lengths: Any, reverse: bool, ops: Arithmetic
) -> State:
    first, outputs = state[0], []
    rows = list(enumerate(ops.steps(gates)))
    for t, row in reversed(rows) if reverse else rows:
        new = step(row, state)
        if lengths is None:
            state = new
            outputs.append(new[0])
        else:
            running = ops.running(lengths, t)
            outputs.append(ops.choose(running, new[0], None))
            state = tuple(ops.choose(running, a, b) for a, b in zip(new, state, strict=True))
    return (ops.stack(outputs[::-1] if reverse else outputs, first), *state)


def _clipper(bound: float, ops: Arithmetic) -> Callable[[Any], Any]:
    return (lambda x: x) if bound == math.inf else (lambda x: ops.clip(x, bound))
