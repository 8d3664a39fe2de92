"""What one block of a `PrimFunc` reads and writes, and what it reduces."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

PURE = 1
"""TVM's mark of what has no effect and depends on its operands alone (`CallEffectKind`)."""


class NotBlocks(Exception):
    """A function is more than blocks in loops of known sizes: nothing is known of how it may be split."""


class Body:
    """What a block does with buffers. Raises NotBlocks where that cannot be told.

    An index is a variable of the block, or None for anything else.
    """

    def __init__(self, block: Any, buffers: Collection[Any], loops: Collection[Any]) -> None:
        if block.alloc_buffers or block.match_buffers:
            raise NotBlocks
        kinds = {item.var: item.iter_type for item in block.iter_vars}
        if set(kinds.values()) - {_PARALLEL, _REDUCED}:
            raise NotBlocks
        self.block = block
        self.parallel = {v for v, kind in kinds.items() if kind == _PARALLEL}
        self.reduced = {v for v, kind in kinds.items() if kind == _REDUCED}
        self.accesses: list[tuple[Any, tuple[Any, ...]]] = []
        """Buffers that are read or written, and the indices."""
        self.stores: list[tuple[Any, tuple[Any, ...]]] = []
        """Those that are written."""
        self.computed_with: set[Any] = set()
        """The variables that stand elsewhere than as an index."""
        self._buffers, self._loops, self._refused = buffers, loops, False
        for statement in (block.init, block.body):
            if statement is not None:
                self._read(statement)
        if self._refused:
            raise NotBlocks
        regions = (*block.reads, *block.writes)
        self.stretches = [(r.source, d) for r in regions for d, part in enumerate(r.region) if number(part.extent) != 1]
        """The dims of buffers, by position, of which the block touches more than one element at a time."""

    def _read(self, node: Any) -> None:
        import tvm_ffi

        tvm_ffi.structural_walk(node, self._seen, order="pre")

    def _seen(self, node: Any) -> Any:
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
            # A buffer that is not read or written here is given away.
            self._refused |= node in self._buffers or node in self._loops
            if node in self.parallel or node in self.reduced:
                self.computed_with.add(node)
            return skip
        self._refused |= not _is_harmless(node)
        return None

    def _access(self, buffer: Any, indices: Any) -> tuple[Any, tuple[Any, ...]]:
        """Note an access, and what is computed for its indices. A look-up may read anywhere: it is refused."""
        self._refused |= buffer not in self._buffers
        plain = tuple(index if index in self.parallel or index in self.reduced else None for index in indices)
        for index, variable in zip(indices, plain, strict=True):
            if variable is None:
                self._refused |= bool(_loads(index))
                self._read(index)
        self.accesses.append((buffer, plain))
        return buffer, plain


@dataclass(frozen=True)
class Reduction:
    """A block that joins terms by `kind` (``sum``, ``max``, ``min``)."""

    kind: str
    neutral: frozenset[Any]
    """The reduced variables along which operands may be filled up, with 0 for a sum, without changing the result."""


def reduction(body: Body, operands: Collection[Any]) -> Reduction | None:
    """The reduction that a block is: ``out = init`` and ``out = out + term``; None where it is another thing."""
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
    started = init.buffer.same_as(update.buffer) and tvm_ffi.structural_equal(init.indices, update.indices)
    again = sum(buffer.same_as(update.buffer) for buffer in _loads(update.value))
    if not started or again != 1:
        return None
    for old, term in ((update.value.a, update.value.b), (update.value.b, update.value.a)):
        if _is_at(old, update):
            test = _vanishes if kind == "sum" else _is_load
            return Reduction(kind, frozenset(v for v in body.reduced if test(term, v, operands)))
    return None


def number(expression: Any) -> int:
    """A number that the function names. Raises NotBlocks where it is computed."""
    from tvm import tirx

    if isinstance(expression, int):
        return expression
    if not isinstance(expression, tirx.IntImm):
        raise NotBlocks
    return int(expression.value)


_PARALLEL, _REDUCED = 0, 2  # of tirx.IterVar


def _is_harmless(node: Any) -> bool:
    """Whether a part of a block computes what its operands say, and never fails on what fills short shards."""
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
    """Whether an expression is the element that `store` writes."""
    import tvm_ffi
    from tvm import ir

    same = isinstance(load, ir.TensorLoad) and load.source.same_as(store.buffer)
    return same and bool(tvm_ffi.structural_equal(load.indices, store.indices, map_free_vars=False))


def _loads(node: Any) -> list[Any]:
    """The buffers that an expression reads, each as often as it does."""
    import tvm_ffi
    from tvm import ir

    found: list[Any] = []
    tvm_ffi.structural_walk(node, (ir.TensorLoad, lambda load: found.append(load.source)))
    return found


def _is_load(term: Any, variable: Any, operands: Collection[Any]) -> bool:
    """Whether a term is the element of an operand at `variable`."""
    from tvm import ir

    return (
        isinstance(term, ir.TensorLoad) and term.source in operands and any(variable.same_as(i) for i in term.indices)
    )


def _vanishes(term: Any, variable: Any, operands: Collection[Any]) -> bool:
    """Whether a term is surely 0 where the operands' elements at `variable` are."""
    from tvm import tirx

    if isinstance(term, tirx.Cast):
        return _vanishes(term.value, variable, operands)
    if isinstance(term, (tirx.Add, tirx.Sub)):
        return all(_vanishes(x, variable, operands) for x in (term.a, term.b))
    if isinstance(term, tirx.Mul):
        factors = [x for x in (term.a, term.b) if not _is_number(x)]
        return bool(factors) and all(_vanishes(x, variable, operands) for x in factors)
    return _is_load(term, variable, operands)
