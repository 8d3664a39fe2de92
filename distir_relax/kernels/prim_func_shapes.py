"""Specialization of a `PrimFunc` to other shapes: loops, blocks and buffers get the extents of a shard."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from distir_relax.kernels.prim_func_factors import BlockFactors, block_factors, dims_of


def with_shapes(function: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """Return `function` with parameters of these shapes, where dims of one class have one size.

    One with symbolic shapes takes any, and is returned unchanged.
    A block with an empty reduction only initializes its result. Raises ValueError for invalid shapes.
    """
    if has_symbolic_shapes(function):
        return function
    new_shapes = [tuple(shape) for shape in shapes]
    if new_shapes == [tuple(int(n) for n in p.shape) for p in function.params]:
        return function
    factors = block_factors(function)
    if factors is None:
        raise ValueError(f"expected a PrimFunc with factors, to give it the shapes {new_shapes}")
    return _Resizing(factors, _sizes(factors, new_shapes)).apply(function)


def has_symbolic_shapes(function: Any) -> bool:
    """Return whether a parameter of a `PrimFunc` has a symbolic size."""
    return not all(hasattr(n, "value") for p in function.params for n in getattr(p, "shape", ()))


def _sizes(factors: BlockFactors, shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for buffer, shape in zip((*factors.operands, *factors.results), shapes, strict=True):
        for (key, old_size), size in zip(dims_of(buffer), shape, strict=True):
            root = factors.root(key)
            if sizes.setdefault(root, size) != size or (size != old_size and root in factors.blocked):
                raise ValueError(f"dims of one factor of a PrimFunc are {sizes[root]} and {size}, of {old_size}")
    return sizes


class _Resizing:
    """Maps each part of a function to its counterpart for the new sizes."""

    def __init__(self, factors: BlockFactors, sizes: dict[int, int]) -> None:
        self.factors, self.sizes = factors, sizes
        self.buffers = {buffer: self._buffer(buffer) for buffer in factors.buffers}

    def apply(self, function: Any) -> Any:
        import tvm_ffi
        from tvm import ir, s_tir, tirx

        callbacks = [
            (tirx.For, self._loop),
            (tirx.IterVar, self._variable),
            (s_tir.SBlock, self._block),
            (ir.Var, lambda v: self.buffers.get(v, v)),
        ]
        mapped = tvm_ffi.structural_map(function, callbacks)
        # Rebuilt, since a function caches its type.
        return tirx.PrimFunc(mapped.params, mapped.body, mapped.ret_type, mapped.attrs)

    def _size(self, key: Hashable, old: Any) -> Any:
        """Return the size of the class of `key`, as an integer of `old`'s type; `old` if it has no class."""
        from tvm import tirx

        size = self.sizes.get(self.factors.root(key)) if key in self.factors else None
        return old if size is None else tirx.IntImm(old.ty, size)

    def _extent(self, key: Hashable, old: Any) -> Any:
        """As `_size`, for loops: an empty reduction still runs once, to initialize the result."""
        from tvm import tirx

        size = self._size(key, old)
        is_empty_reduction = int(size) == 0 and self.factors.root(key) in self.factors.reduced
        return tirx.IntImm(old.ty, 1) if is_empty_reduction else size

    def _buffer(self, buffer: Any) -> Any:
        from tvm import tirx

        shape = [self._size(key, n) for (key, _), n in zip(dims_of(buffer), buffer.shape, strict=True)]
        return tirx.decl_buffer(shape, buffer.dtype, buffer.name, scope=buffer.scope(), layout=None)

    def _loop(self, loop: Any) -> Any:
        from tvm import tirx

        extent = self._extent(loop.loop_var, loop.extent)
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body, None, loop.annotations)

    def _variable(self, item: Any) -> Any:
        from tvm import ir, tirx

        extent = self._extent(item.var, item.dom.extent)
        return tirx.IterVar(ir.Range.from_min_extent(item.dom.min, extent), item.var, item.iter_type)

    def _block(self, block: Any) -> Any:
        """Map a block; one with an empty reduction only initializes."""
        from tvm import s_tir

        roots = {self.factors.root(item.var) for item in block.iter_vars if item.var in self.factors}
        if not any(self.sizes.get(root) == 0 for root in roots & self.factors.reduced):
            return block
        return s_tir.SBlock(block.iter_vars, [], block.writes, block.name_hint, block.init)
