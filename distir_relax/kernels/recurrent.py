"""Recurrences over the steps of a sequence: one direction of one layer, with the input's part of the gates computed.

A cell is written once, over an `Arithmetic`: torch here, Relax in `distir_relax.lowering.emit.relax_recurrent`. For
`t` steps, a batch of `n` and `h` hidden units::

    gates (t, n, G h)   weight (G h, p)   state (n, p)   ->   outputs (t, n, p), last state (n, p)

`G` is how many gates the cell has; `order` names them in the order in which `gates` and `weight` hold them. `p` is `h`
except for an LSTM with a projection. Where `lengths` (n) are given, a sequence has ended at step `lengths[i]`: its
state stays from there on, and its outputs are zero. With `reverse` the last step comes first; outputs stay in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

State = tuple[Any, ...]


class Arithmetic(Protocol):
    """What cells compute with, beside ``+``, ``-`` and ``*``."""

    def steps(self, x: Any) -> Sequence[Any]:
        """The elements of the first dim."""

    def affine(self, x: Any, h: Any, weight: Any) -> Any:
        """``x + h weight^T``."""

    def product(self, h: Any, weight: Any) -> Any:
        """``h weight^T``."""

    def split(self, x: Any, parts: int, axis: int = -1) -> Sequence[Any]:
        """Dim `axis` in equal parts."""

    def activation(self, name: str, x: Any) -> Any:
        """One of `ACTIVATIONS` of `x`."""

    def clip(self, x: Any, bound: float) -> Any:
        """`x` held between ``-bound`` and `bound`."""

    def running(self, lengths: Any, t: int) -> Any:
        """Which sequences have a step `t`, as a boolean (n, 1)."""

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`; zero where `b` is None."""

    def named(self, x: Any) -> Any:
        """`x`, computed once however often it is used."""

    def stack(self, outputs: Sequence[Any], like: Any) -> Any:
        """The outputs of all steps as one tensor; where there are none, an empty one with rows as `like`."""


ACTIVATIONS = ("sigmoid", "tanh", "relu", "hard_sigmoid")
"""``hard_sigmoid`` is ``clip(0.2 x + 0.5, 0, 1)``."""


class _Torch:
    """Torch's arithmetic."""

    def steps(self, x: Any) -> Sequence[Any]:
        found: Sequence[Any] = x.unbind(0)
        return found

    def affine(self, x: Any, h: Any, weight: Any) -> Any:
        return x.addmm(h, weight.t())

    def product(self, h: Any, weight: Any) -> Any:
        return h @ weight.t()

    def split(self, x: Any, parts: int, axis: int = -1) -> Sequence[Any]:
        found: Sequence[Any] = x.chunk(parts, axis)
        return found

    def activation(self, name: str, x: Any) -> Any:
        return (x * 0.2 + 0.5).clamp(0, 1) if name == "hard_sigmoid" else getattr(x, name)()

    def clip(self, x: Any, bound: float) -> Any:
        return x.clamp(-bound, bound)

    def running(self, lengths: Any, t: int) -> Any:
        return (lengths > t).unsqueeze(-1)

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return a.where(condition, a.new_zeros(()) if b is None else b)

    def named(self, x: Any) -> Any:
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
    gates, the cell's input and its output; what goes into the first two is clipped, as ONNX Runtime does. `peepholes`
    (3 h) weigh the cell state in the input, output and forget gates, in this order. `projection` (p, h) makes the
    output smaller.
    """
    inner, middle, outer = activations
    cut = _clipper(clip, ops)
    peeps = dict(zip("iof", ops.split(peepholes, 3), strict=True)) if peepholes is not None else {}

    def looking(parts: dict[str, Any], gate: str, cell: Any) -> Any:
        x = parts[gate] + peeps[gate] * cell if peeps else parts[gate]
        return ops.activation(inner, cut(x))

    def step(x: Any, state: State) -> State:
        hidden, cell = state
        parts = dict(zip(order, ops.split(ops.affine(x, hidden, weight), 4), strict=True))
        kept = looking(parts, "f", cell) * cell
        cell = ops.named(kept + looking(parts, "i", cell) * ops.activation(middle, cut(parts["c"])))
        hidden = ops.named(looking(parts, "o", cell) * ops.activation(outer, cell))
        return (hidden if projection is None else ops.named(ops.product(hidden, projection))), cell

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
    """Gated recurrent units: outputs and last state.

    `order` is of the gates ``r`` (reset), ``z`` (update) and ``n`` (new). With `reset_after` the reset gate weighs the
    product of state and weight, and `bias` (3 h) is added to that product before; else it weighs the state.
    """
    inner, outer = activations
    cut = _clipper(clip, ops)

    def step(x: Any, state: State) -> State:
        (hidden,) = state
        given = dict(zip(order, ops.split(x, 3), strict=True))
        whole = ops.product(hidden, weight)
        mine = dict(zip(order, ops.split(whole if bias is None else whole + bias, 3), strict=True))
        reset, update = (ops.activation(inner, cut(given[gate] + mine[gate])) for gate in "rz")
        again = reset * mine["n"] if reset_after else ops.product(ops.named(reset * hidden), rows["n"])
        new = ops.activation(outer, cut(given["n"] + again))
        return (ops.named(new + update * (hidden - new)),)

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
    """The plain recurrence ``state = activation(gates[t] + state weight^T)``: outputs and last state."""
    cut = _clipper(clip, ops)

    def step(x: Any, state: State) -> State:
        return (ops.activation(activations[0], cut(ops.affine(x, state[0], weight))),)

    return _run(gates, (h,), step, lengths, reverse, ops)


def gradients(*operands: Any, cell: str, wanted: Sequence[int], extras: Sequence[str], **options: Any) -> Any:
    """The gradients of the operands `wanted` of a cell (``lstm``, ``gru``, ``rnn``): backpropagation through time.

    A tensor where one is wanted, else a tuple.

    Behind the cell's operands, of which `extras` names those that may be left out, stand the gradients of its results.
    The forward step is computed anew, by torch, which differentiates it.
    """
    import torch

    run, states = _CELLS[cell]
    fixed = 2 + states
    # What a rank computes with keeps no record of how it was computed; copies made here do.
    with torch.inference_mode(False), torch.enable_grad():
        given = [x.clone() for x in operands]
        given, seeds = given[: fixed + len(extras)], given[fixed + len(extras) :]
        sources = [given[i].requires_grad_() for i in wanted]
        results = run(*given[:fixed], **dict(zip(extras, given[fixed:], strict=True)), **options)
        # Where there are no steps, or no sequences, results do not depend on all operands.
        pairs = [(y, g) for y, g in zip(results, seeds, strict=True) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs], sources, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )
    results = tuple(x.detach() for x in found)
    return results if len(results) > 1 else results[0]


_CELLS: dict[str, tuple[Callable[..., State], int]] = {"lstm": (lstm, 2), "gru": (gru, 1), "rnn": (rnn, 1)}
"""Each cell, and how many states it has."""


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
