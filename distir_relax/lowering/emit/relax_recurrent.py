"""The cells of `distir_relax.kernels.recurrent` in Relax, with the steps of a sequence unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from distir_relax.kernels import recurrent
from distir_relax.lowering.emit.relax_sizes import known_dim


def recurrent_scope(bind: Callable[[Any], Any]) -> SimpleNamespace:
    """Return the cells, built from Relax ops; `bind` binds a call to a variable of the function under construction.

    A sequence of `t` steps becomes about ten ops per step: TVM compiles programs with long sequences slowly.
    """
    ops = _Relax(bind)
    return SimpleNamespace(
        **{cell.__name__: partial(_results, cell, ops) for cell in (recurrent.lstm, recurrent.gru, recurrent.rnn)}
    )


def _results(cell: Callable[..., recurrent.State], ops: _Relax, *operands: Any, **options: Any) -> Any:
    return cell(*operands, **options, ops=ops)


class _Relax:
    """Relax's arithmetic; expressions used more than once are bound to variables."""

    def __init__(self, bind: Callable[[Any], Any]) -> None:
        from tvm import relax

        self.bind = bind
        self._op: Any = relax.op
        self._const: Any = relax.const

    def steps(self, x: Any) -> Sequence[Any]:
        rows = (self._op.strided_slice(x, (0,), (t,), (t + 1,)) for t in range(known_dim(x, 0)))
        return [self.bind(self._op.squeeze(row, [0])) for row in rows]

    def affine(self, x: Any, h: Any, weight: Any) -> Any:
        return self._op.add(x, self.product(h, weight))

    def product(self, h: Any, weight: Any) -> Any:
        return self._op.matmul(h, self.bind(self._op.permute_dims(weight)))

    def split(self, x: Any, parts: int, axis: int = -1) -> Sequence[Any]:
        parts_tuple = self.bind(self._op.split(x, parts, axis))
        return [self.bind(parts_tuple[i]) for i in range(parts)]

    def activation(self, name: str, x: Any) -> Any:
        if name == "hard_sigmoid":
            x = self.bind(x)
            slope, shift = (self._const(number, str(x.ty.dtype)) for number in (0.2, 0.5))
            return self.bind(self._op.clip(self._op.add(self._op.multiply(x, slope), shift), 0, 1))
        return self.bind(self._op.nn.relu(x) if name == "relu" else getattr(self._op, name)(x))

    def clip(self, x: Any, bound: float) -> Any:
        return self._op.clip(x, -bound, bound)

    def running(self, lengths: Any, t: int) -> Any:
        after = self._op.greater(lengths, self._const(t, str(lengths.ty.dtype)))
        return self.bind(self._op.expand_dims(after, -1))

    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        a = self.bind(a)
        other = self._const(0, str(a.ty.dtype)) if b is None else b
        return self.bind(self._op.where(condition, a, other))

    def stack(self, outputs: Sequence[Any], like: Any) -> Any:
        return self._op.stack(list(outputs)) if outputs else None
