"""A `PrimFunc` for other shapes: loops, blocks and buffers run as far as a shard does."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from distir_relax.kernels.prim_func_factors import BlockFactors, block_factors, dims_of


def with_shapes(function: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """`function` with parameters of these shapes, in which dims of the same class have one size.

    A block that reduces nothing gives what it starts from. Raises ValueError where the function cannot have the shapes.
    """
    given = [tuple(shape) for shape in shapes]
    if given == [tuple(int(n) for n in p.shape) for p in function.params]:
        return function
    factors = block_factors(function)
    if factors is None:
        raise ValueError(f"a PrimFunc that has no factors, with shapes {given}")
    return _Resizing(factors, _sizes(factors, given)).apply(function)


def _sizes(factors: BlockFactors, shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for buffer, shape in zip((*factors.operands, *factors.results), shapes, strict=True):
        for (key, whole), size in zip(dims_of(buffer), shape, strict=True):
            root = factors.root(key)
            if sizes.setdefault(root, size) != size or (size != whole and root in factors.blocked):
                raise ValueError(f"dims of a PrimFunc that belong together are {sizes[root]} and {size} of {whole}")
    return sizes


class _Resizing:
    """Maps each part of a function to the one for the new sizes."""

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
        found = tvm_ffi.structural_map(function, callbacks)
        # Made anew, since a function keeps the type that it was made with.
        return tirx.PrimFunc(found.params, found.body, found.ret_type, found.attrs)

    def _size(self, key: Hashable, old: Any) -> Any:
        """The size of the class of `key`, as wide a number as `old`, which it is where the class has none."""
        from tvm import tirx

        known = self.sizes.get(self.factors.root(key)) if key in self.factors else None
        return old if known is None else tirx.IntImm(old.ty, known)

    def _extent(self, key: Hashable, old: Any) -> Any:
        """As `_size`, of what a loop runs over: once where there is nothing to reduce, for the start."""
        from tvm import tirx

        size = self._size(key, old)
        starts = int(size) == 0 and self.factors.root(key) in self.factors.reduced
        return tirx.IntImm(old.ty, 1) if starts else size

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
        """A block; one that has nothing to reduce only writes what it starts from."""
        from tvm import s_tir

        roots = {self.factors.root(item.var) for item in block.iter_vars if item.var in self.factors}
        if not any(self.sizes.get(root) == 0 for root in roots & self.factors.reduced):
            return block
        return s_tir.SBlock(block.iter_vars, [], block.writes, block.name_hint, block.init)
