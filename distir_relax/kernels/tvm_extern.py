"""Functions that were written for TVM, or registered with it: what they compute only they know.

They write their results: a function takes the operands, then tensors for the results.
"""

from __future__ import annotations

import base64
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.kernels.prim_func_shapes import with_shapes

if TYPE_CHECKING:
    import torch


def call_tir(source: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: torch.Tensor) -> Any:
    """The results, of these shapes and dtypes, of a `PrimFunc` given as `packed_text` makes it; one is given bare.

    Where operands and results are a device's part of those that the `PrimFunc` is for, it is made for their shapes.
    """
    if not any(math.prod(shape) for shape in shapes):
        return _bare(_empty(shapes, dtypes))
    with _lock:
        function = _built(source, (*(tuple(x.shape) for x in operands), *(tuple(shape) for shape in shapes)))
    return _called(function, shapes, dtypes, operands)


def call_packed(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: torch.Tensor) -> Any:
    """As `call_tir`, of a function registered with TVM in this process. Raises RunError where there is none."""
    import tvm_ffi

    function = tvm_ffi.get_global_func(name, allow_missing=True)
    if function is None:
        raise RunError(
            f"no function {name!r} is registered with TVM in this process",
            hint="import what registers it (tvm_ffi.register_global_func) in every rank",
        )
    return _called(function, shapes, dtypes, operands)


def packed_text(function: Any) -> str:
    """A `PrimFunc` as a short text."""
    import tvm

    return base64.b64encode(zlib.compress(tvm.ir.save_json(function).encode(), 9)).decode()


def unpacked(source: str) -> Any:
    """The `PrimFunc` of a text that `packed_text` has made. Raises ValueError for another text."""
    import tvm

    try:
        return tvm.ir.load_json(zlib.decompress(base64.b64decode(source)).decode())
    except Exception as error:  # what zlib, and TVM's reader, say of it
        raise ValueError(f"not a PrimFunc's text: {error}") from None


_lock = threading.Lock()


@lru_cache
def _built(source: str, shapes: tuple[tuple[int, ...], ...]) -> Callable[..., None]:
    import tvm

    function = with_shapes(unpacked(source), shapes).with_attr("global_symbol", "main")
    built: Callable[..., None] = tvm.compile(tvm.IRModule({"main": function}), target="llvm")["main"]
    return built


def _called(
    function: Callable[..., None],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    operands: Sequence[torch.Tensor],
) -> Any:
    results = _empty(shapes, dtypes)
    function(*(_given(x) for x in (*operands, *results)))
    return _bare(results)


def _empty(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[torch.Tensor]:
    """Tensors that a function is to write."""
    import torch

    return [torch.empty(tuple(shape), dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _bare(results: list[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _given(x: torch.Tensor) -> Any:
    """`x` in memory as TVM's code expects it."""
    from tvm import runtime

    if not x.numel():  # torch's strides of nothing are not those of a compact array to TVM
        return runtime.empty(tuple(x.shape), str(x.dtype).removeprefix("torch."))
    x = x.detach().contiguous()
    return runtime.from_dlpack(x if x.data_ptr() % 64 == 0 else x.clone())
