"""Analysis of one block of a `PrimFunc`: accesses and reduction."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

PURE = 1
"""TVM's `CallEffectKind` of calls without effects that depend only on their operands."""


class UnsupportedPrimFunc(Exception):
    """The function consists of more than blocks in loops of constant sizes, so its factors are unknown."""


class Body:
    """Buffer accesses of a block. Raises UnsupportedPrimFunc if they cannot be determined.

    An index is a variable of the block, or None for any other expression.
    """

    def __init__(self, block: Any, buffers: Collection[Any], loops: Collection[Any]) -> None:
        if block.alloc_buffers or block.match_buffers:
            raise UnsupportedPrimFunc
        iter_types = {item.var: item.iter_type for item in block.iter_vars}
        if set(iter_types.values()) - {_PARALLEL, _REDUCED}:
            raise UnsupportedPrimFunc
        self.block = block
        self.parallel = {v for v, iter_type in iter_types.items() if iter_type == _PARALLEL}
        self.reduced = {v for v, iter_type in iter_types.items() if iter_type == _REDUCED}
        self.accesses: list[tuple[Any, tuple[Any, ...]]] = []
        """Buffers that are read or written, with their indices."""
        self.stores: list[tuple[Any, tuple[Any, ...]]] = []
        """Buffers that are written, with their indices."""
        self.nonindex_variables: set[Any] = set()
        """Variables that are used other than as an index."""
        self._buffers, self._loops, self._unsupported = buffers, loops, False
        for statement in (block.init, block.body):
            if statement is not None:
                self._read(statement)
        if self._unsupported:
            raise UnsupportedPrimFunc
        regions = (*block.reads, *block.writes)
        self.wide_dims = [(r.source, d) for r in regions for d, part in enumerate(r.region) if number(part.extent) != 1]
        """The dims of buffers, by position, of which the block accesses more than one element at a time."""

    def _read(self, node: Any) -> None:
        import tvm_ffi

        tvm_ffi.structural_walk(node, self._visit, order="pre")

    def _visit(self, node: Any) -> Any:
        import tvm_ffi
        from tvm import ir, tirx

        skip = tvm_ffi.WalkResult.SKIP
        if isinstance(node, tirx.BufferStore):
            self.stores.append(self._access(node.buffer, node.indices))
            self._read(node.value)
            return skip
        if isinstance(node, ir.TensorLoad):
            self._access(node.source, node.indices)
            return skip
        if isinstance(node, ir.Var):
            # A buffer that is used other than by element access escapes.
            self._unsupported |= node in self._buffers or node in self._loops
            if node in self.parallel or node in self.reduced:
                self.nonindex_variables.add(node)
            return skip
        self._unsupported |= not _is_safe(node)
        return None

    def _access(self, buffer: Any, indices: Any) -> tuple[Any, tuple[Any, ...]]:
        """Record an access, and visit computed indices. Indirect accesses are unsupported."""
        self._unsupported |= buffer not in self._buffers
        index_variables = tuple(index if index in self.parallel or index in self.reduced else None for index in indices)
        for index, variable in zip(indices, index_variables, strict=True):
            if variable is None:
                self._unsupported |= bool(_loads(index))
                self._read(index)
        self.accesses.append((buffer, index_variables))
        return buffer, index_variables


@dataclass(frozen=True)
class Reduction:
    """A block that reduces terms by `kind` (``sum``, ``max``, ``min``)."""

    kind: str
    neutral: frozenset[Any]
    """The reduced variables along which operands may be padded, with 0 for a sum, without changing the result."""


def reduction(body: Body, operands: Collection[Any]) -> Reduction | None:
    """Return the block's reduction, ``out = init`` and ``out = out + term``; None if it has another form."""
    import tvm_ffi
    from tvm import tirx

    update, init = body.block.body, body.block.init
    if not isinstance(update, tirx.BufferStore) or not isinstance(init, tirx.BufferStore) or not body.reduced:
        return None
    kind = next(
        (k for k, t in (("sum", tirx.Add), ("max", tirx.Max), ("min", tirx.Min)) if type(update.value) is t), ""
    )
    if not kind or not _is_number(init.value) or (kind == "sum" and init.value.value != 0):
        return None
    is_initialized = init.buffer.same_as(update.buffer) and tvm_ffi.structural_equal(init.indices, update.indices)
    self_reads = sum(buffer.same_as(update.buffer) for buffer in _loads(update.value))
    if not is_initialized or self_reads != 1:
        return None
    for previous, term in ((update.value.a, update.value.b), (update.value.b, update.value.a)):
        if _is_at(previous, update):
            is_neutral = _is_zero_at if kind == "sum" else _is_load
            return Reduction(kind, frozenset(v for v in body.reduced if is_neutral(term, v, operands)))
    return None


def number(expression: Any) -> int:
    """Return a constant integer. Raises UnsupportedPrimFunc if it is not constant."""
    from tvm import tirx

    if isinstance(expression, int):
        return expression
    if not isinstance(expression, tirx.IntImm):
        raise UnsupportedPrimFunc
    return int(expression.value)


_PARALLEL, _REDUCED = 0, 2  # of tirx.IterVar


def _is_safe(node: Any) -> bool:
    """Whether a node has no side effects and cannot fail on the padding of short shards."""
    from tvm import ir, tirx

    if isinstance(node, ir.Call):
        effect = node.op.get_attr("TCallEffectKind") if isinstance(node.op, ir.Op) else None
        return effect is not None and int(effect) <= PURE
    if isinstance(node, (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)):
        return "float" in str(node.ty.dtype) or (isinstance(node.b, tirx.IntImm) and node.b.value != 0)
    if isinstance(node, tirx.Stmt):
        return isinstance(node, (tirx.SeqStmt, tirx.For, tirx.IfThenElse))
    return True


def _is_number(node: Any) -> bool:
    from tvm import tirx

    return isinstance(node, (tirx.IntImm, tirx.FloatImm)) and math.isfinite(node.value)


def _is_at(load: Any, store: Any) -> bool:
    """Whether an expression loads the element that `store` writes."""
    import tvm_ffi
    from tvm import ir

    same = isinstance(load, ir.TensorLoad) and load.source.same_as(store.buffer)
    return same and bool(tvm_ffi.structural_equal(load.indices, store.indices, map_free_vars=False))


def _loads(node: Any) -> list[Any]:
    """Return the buffers that an expression reads, once per load."""
    import tvm_ffi
    from tvm import ir

    buffers: list[Any] = []
    tvm_ffi.structural_walk(node, (ir.TensorLoad, lambda load: buffers.append(load.source)))
    return buffers


def _is_load(term: Any, variable: Any, operands: Collection[Any]) -> bool:
    """Whether a term is the element of an operand at `variable`."""
    from tvm import ir

    return (
        isinstance(term, ir.TensorLoad) and term.source in operands and any(variable.same_as(i) for i in term.indices)
    )


def _is_zero_at(term: Any, variable: Any, operands: Collection[Any]) -> bool:
    """Whether a term is always 0 if the operands' elements at `variable` are."""
    from tvm import tirx

    if isinstance(term, tirx.Cast):
        return _is_zero_at(term.value, variable, operands)
    if isinstance(term, (tirx.Add, tirx.Sub)):
        return all(_is_zero_at(x, variable, operands) for x in (term.a, term.b))
    if isinstance(term, tirx.Mul):
        factors = [x for x in (term.a, term.b) if not _is_number(x)]
        return bool(factors) and all(_is_zero_at(x, variable, operands) for x in factors)
    return _is_load(term, variable, operands)
