"""Functions of indices in Relax: ranges of numbers, and ops on them (`kernels.positions.indexed`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distir_relax.kernels.index_expression import compute, dim_of


def indexed_tensor(constant: Callable[[Any, str], Any], emit: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the composition of `kernels.positions.indexed`, with the functions for scalars and for emitted values."""
    from tvm import relax

    def call(op: str, *operands: Any) -> Any:
        return emit(getattr(relax.op, op)(*operands))

    def indexed(value: str, names: Sequence[str], sizes: Sequence[Any], shape: Sequence[Any], dtype: str) -> Any:
        known = dict(zip(names, sizes, strict=True))

        def named(name: str) -> Any:
            if name in known:
                return constant(known[name], "int64")
            dim = dim_of(name, len(shape))
            numbers = emit(relax.op.arange(0, shape[dim], 1, "int64"))
            return call("reshape", numbers, [n if d == dim else 1 for d, n in enumerate(shape)])

        found = compute(value, named, lambda n: constant(n, "bool" if isinstance(n, bool) else "int64"), call)
        if str(found.ty.dtype) != dtype:
            found = call("astype", found, dtype)
        return call("broadcast_to", found, list(shape))

    return indexed
