"""Whether a position of a program over a sequence depends on earlier positions alone.

No rule says so of attention, whose mask decides it. So the program is run twice, on inputs that differ in later
positions, and every value along the sequence is compared at the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.errors import UnsupportedOpError
from distir_relax.interpret.interpreter import Domain, Interpreter
from distir_relax.ir import Inline, Module, Op, TensorType, Value
from distir_relax.ir.symbols import check_symbols, module_symbols, specialize
from distir_relax.layout import Symbol, symbols_of
from distir_relax.ops import evaluate

if TYPE_CHECKING:
    import torch

_LENGTH, _EARLIER = 7, 4


def check_causality(module: Module, tensors: Mapping[str, torch.Tensor], sequence: str) -> None:
    """Run a global program twice, with the data `tensors` of its weights; other symbols than `sequence` are small.

    Raises `UnsupportedOpError` for the first op whose result at some position depends on a later one, and `DistIRError`
    if the program has no size `sequence`.
    """
    module = Inline().run(module)
    symbols = module_symbols(module)
    check_symbols([sequence], symbols)
    along = symbols[sequence]
    length = along.nearest(_LENGTH)
    earlier = min(_EARLIER, length - 1)
    fixed = specialize(module, {name: s.nearest(1) for name, s in symbols.items()} | {sequence: length})
    pairs = []
    for item, concrete in zip(module.main.inputs, fixed.main.inputs, strict=True):
        if item.value.name in tensors:
            pairs.append((tensors[item.value.name],) * 2)
        else:
            kind = concrete.value.tensor
            dims = _positions(item.value, along, kind.shape, length)
            pairs.append(_inputs(kind, dims or [], earlier, len(pairs)))
    # The final state of a recurrent layer depends on all positions, and is mostly unused.
    used = {v.name for op in module.main.ops for v in op.operands} | {o.value.name for o in module.main.outputs}
    values = {v.name: v for op in module.main.ops for v in op.results if v.name in used}
    Interpreter(fixed, _Pairs(values, along, length, earlier)).run(pairs)


_Pair = tuple["torch.Tensor", "torch.Tensor"]


class _Pairs(Domain[_Pair]):
    """The tensors of two runs, equal at the `earlier` positions."""

    def __init__(self, values: Mapping[str, Value], along: Symbol, length: int, earlier: int) -> None:
        self.values, self.along, self.length, self.earlier = values, along, length, earlier

    def apply(self, op: Op, operands: Sequence[_Pair]) -> Sequence[_Pair]:
        from distir_relax.support.deferred_tensor import read_deferred

        if all(a is b for a, b in operands):
            return [(x, x) for x in evaluate(op, [a for a, _ in operands])]
        # A weight that is read from a file is read once.
        operands = [(x, x) if a is b else (a, b) for a, b in operands for x in (read_deferred(a) if a is b else a,)]
        runs = [evaluate(op, [pair[number] for pair in operands]) for number in range(2)]
        results = list(zip(*runs, strict=True))
        for value, (a, b) in zip(op.results, results, strict=True):
            if value.name not in self.values:
                continue
            dims = _positions(self.values[value.name], self.along, a.shape, self.length)
            if dims is None:
                continue
            for dim in dims:
                a, b = a.narrow(dim, 0, self.earlier), b.narrow(dim, 0, self.earlier)
            if not are_close(a, b):
                raise UnsupportedOpError(
                    f"{op.name} makes positions along {self.along} depend on later ones",
                    op.location,
                    "only a causal model can continue a sequence: give its attention a causal mask",
                )
        return results


def _positions(value: Value, along: Symbol, shape: Sequence[int], length: int) -> list[int] | None:
    """Return the dims of positions; None if others depend on the length, such as two choices of experts a position."""
    dims = [d for d, size in enumerate(value.tensor.shape) if along in symbols_of(size)]
    return dims if all(shape[d] == length for d in dims) else None


def _inputs(kind: TensorType, dims: Sequence[int], earlier: int, seed: int) -> _Pair:
    """Return two random tensors that differ in the later positions. Integers are 0 and 1: valid indices, and a mask."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, kind.dtype)
    if dtype.is_floating_point:
        first, second = (torch.randn(kind.shape, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
    else:
        first = torch.randint(0, 2, kind.shape, generator=generator).to(dtype)
        second = 1 - first if dtype != torch.bool else ~first
    for dim in dims:
        second.narrow(dim, 0, earlier).copy_(first.narrow(dim, 0, earlier))
    return (first, second) if dims else (first, first)


def are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results of one computation differ by rounding alone."""
    import torch

    if not a.is_floating_point():
        return bool((a == b).all())
    scale = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    tolerance = 1e-4 if a.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
