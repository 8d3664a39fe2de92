"""Lines of kernels, which are texts in TVM's script since their registers have names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LANES = 16
"""Elements of a vector register of float32."""


def kernel(arguments: Sequence[str], body: Sequence[str], functions: Mapping[str, Any]) -> Any:
    """Return the `PrimFunc` of lines that use `functions`, and of its arguments, such as ``"rows: T.int64"``."""
    from tvm.script import from_source, tirx

    lines = ["@T.prim_func", f"def kernel(here: T.handle, {', '.join(arguments)}):"]
    lines += indented(['T.match_buffer(here, (1,), "float32")', *body])
    return from_source("\n".join(lines), extra_vars={"T": tirx, **functions})


def indented(lines: Sequence[str]) -> list[str]:
    """Return the lines of a block."""
    return [f"    {line}" for line in lines]


def at_address(name: str, address: str, shape: str, dtype: str) -> list[str]:
    """Return the lines that make a buffer of the data at an address."""
    pointer = f'T.handle("{dtype}")'
    return [
        f"{name}_data: T.let[{pointer}] = T.reinterpret({pointer}.ty, {address})",
        f'{name} = T.decl_buffer(({shape},), "{dtype}", data={name}_data)',
    ]


def local(name: str, count: int = LANES, dtype: str = "float32") -> list[str]:
    """Return the lines that make a buffer of 32-bit elements on the stack: TVM takes others from the heap.

    One of a vector becomes a register, a larger one does not.
    """
    pointer = f'T.handle("{dtype}")'
    return [
        f'{name}_data: T.let[{pointer}] = T.reinterpret({pointer}.ty, T.tvm_stack_alloca("shape", {count // 2}))',
        f'{name} = T.decl_buffer(({count},), "{dtype}", data={name}_data, align=8)',
    ]


def prefetch(address: str) -> str:
    """Return the line that reads data ahead into the second cache, which never fails."""
    to_read, to_second_cache, data = 0, 2, 1
    hints = ", ".join(f"T.int32({hint})" for hint in (to_read, to_second_cache, data))
    return f"T.evaluate(T.call_llvm_intrin('void', 'llvm.prefetch.p0', {address}, {hints}))"
