"""Interpreter of programs over tensors that are known up to symbols, such as the shapes of other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from distir_relax.interpret.interpreter import Domain, Interpreter
from distir_relax.ir import Function, Module, Op, TensorType, Value
from distir_relax.layout import is_symbolic
from distir_relax.ops import SizeArray, Trait, evaluate, infer, lookup, size_array
from distir_relax.ops.table.dispatch import type_of

if TYPE_CHECKING:
    import torch

Known = Union["torch.Tensor", SizeArray]
"""A tensor whose elements are known: a `SizeArray` if some are symbolic."""


def interpret_sizes(function: Function, inputs: Mapping[str, Known]) -> dict[str, Known]:
    """Run a function of the global stage on known tensors by value name; return its outputs by output name.

    Raises NotImplementedError for an op that does not compute sizes (`Semantics.sizes`), and for elements of other
    operands of an op on sizes that are no integers.
    """
    tensors = [inputs[item.value.name] for item in function.inputs]
    results = Interpreter(Module("global", (function,)), _Sizes()).run(tensors)
    return {output.name: tensor for output, tensor in zip(function.outputs, results, strict=True)}


class _Sizes(Domain[Known]):
    def apply(self, op: Op, operands: Sequence[Known]) -> Sequence[Known]:
        if not any(isinstance(x, SizeArray) for x in operands) and not is_symbolic(tuple(op.attrs.values())):
            return evaluate(op, operands)  # type: ignore[arg-type]
        entry = lookup(op.name, op.location)
        if Trait.MOVES in entry.traits and not is_symbolic(tuple(op.attrs.values())):
            return _move(op, operands)
        if entry.semantics.sizes is None:
            raise NotImplementedError(f"{op.name} of symbolic sizes")
        (kind,) = infer(op.name, [v.tensor for v in op.operands], op.attrs, op.location)
        return (_known(entry.semantics.sizes(list(map(_entries, operands)), op.attrs), kind),)


def _move(op: Op, operands: Sequence[Known]) -> Sequence[Known]:
    """Run an op that moves elements on their numbers: each operand that is no index has its own range of them."""
    import numpy as np
    import torch

    indices = lookup(op.name).split.indices
    elements: list[Any] = []
    numbers: list[torch.Tensor] = []
    for i, x in enumerate(operands):
        if i in indices:
            if isinstance(x, SizeArray):
                raise NotImplementedError(f"{op.name} by symbolic indices")
            numbers.append(x)
            continue
        entries = _entries(x)
        first = len(elements)
        elements += entries.reshape(-1).tolist()
        numbers.append(torch.arange(first, len(elements)).reshape(entries.shape))
    values = tuple(Value(f"x{i}", TensorType(tuple(x.shape), type_of(x).dtype)) for i, x in enumerate(numbers))
    results = evaluate(Op(op.name, values, (), op.attrs, op.location), numbers)
    kinds = infer(op.name, [v.tensor for v in op.operands], op.attrs, op.location)
    pool = np.empty(len(elements), dtype=object)
    pool[:] = elements
    return [_known(pool[result.numpy()], kind) for result, kind in zip(results, kinds, strict=True)]


def _entries(x: Known) -> Any:
    """Return the elements as a numpy array of objects: integers, truth values and symbolic sizes."""
    import numpy as np

    if isinstance(x, SizeArray):
        return x.entries
    elements = [int(n) if isinstance(n, float) and n.is_integer() else n for n in x.reshape(-1).tolist()]
    if any(isinstance(n, float) for n in elements):
        raise NotImplementedError("a fraction")
    entries = np.empty(len(elements), dtype=object)
    entries[:] = elements
    return entries.reshape(tuple(x.shape))


def _known(entries: Any, kind: TensorType) -> Known:
    import torch

    array = size_array(entries, kind.dtype)
    if isinstance(array, SizeArray):
        return array
    return torch.tensor(array.tolist(), dtype=getattr(torch, kind.dtype))
