"""Functions written for TVM, or registered with it, which the compiler treats as opaque.

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
from distir_relax.kernels.recording import runs_whole

if TYPE_CHECKING:
    import torch


@runs_whole
def call_tir(source: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: torch.Tensor) -> Any:
    """Call a `PrimFunc`, given as `packed_text`; return its results, of these shapes and dtypes, one without a tuple.

    If operands and results are a device's shards, the `PrimFunc` is specialized to their shapes.
    """
    if not any(math.prod(shape) for shape in shapes):
        return _single_or_tuple(_empty(shapes, dtypes))
    with _lock:
        function = _build(source, (*(tuple(x.shape) for x in operands), *(tuple(shape) for shape in shapes)))
    return _call_function(function, shapes, dtypes, operands)


@runs_whole
def call_packed(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: torch.Tensor) -> Any:
    """As `call_tir`, for a function registered with TVM in this process. Raises RunError if there is none."""
    import tvm_ffi

    function = tvm_ffi.get_global_func(name, allow_missing=True)
    if function is None:
        raise RunError(
            f"no function {name!r} is registered with TVM in this process",
            hint="import the module that registers it (tvm_ffi.register_global_func) in every rank",
        )
    return _call_function(function, shapes, dtypes, operands)


def packed_text(function: Any) -> str:
    """Serialize a `PrimFunc` to a short text."""
    import tvm

    return base64.b64encode(zlib.compress(tvm.ir.save_json(function).encode(), 9)).decode()


def unpacked(source: str) -> Any:
    """Deserialize the text of `packed_text`. Raises ValueError for any other text."""
    import tvm

    try:
        return tvm.ir.load_json(zlib.decompress(base64.b64decode(source)).decode())
    except Exception as error:  # of zlib, or TVM's reader
        raise ValueError(f"not a PrimFunc's text: {error}") from None


_lock = threading.Lock()


@lru_cache
def _build(source: str, shapes: tuple[tuple[int, ...], ...]) -> Callable[..., None]:
    import tvm

    function = with_shapes(unpacked(source), shapes).with_attr("global_symbol", "main")
    built: Callable[..., None] = tvm.compile(tvm.IRModule({"main": function}), target="llvm")["main"]
    return built


def _call_function(
    function: Callable[..., None],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    operands: Sequence[torch.Tensor],
) -> Any:
    results = _empty(shapes, dtypes)
    function(*(_to_tvm(x) for x in (*operands, *results)))
    return _single_or_tuple(results)


def _empty(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[torch.Tensor]:
    """Allocate result tensors."""
    import torch

    return [torch.empty(tuple(shape), dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _single_or_tuple(results: list[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _to_tvm(x: torch.Tensor) -> Any:
    """Convert `x` to a TVM tensor, in the memory layout that TVM's code expects."""
    from tvm import runtime

    if not x.numel():  # torch's strides of an empty tensor are not compact for TVM
        return runtime.empty(tuple(x.shape), str(x.dtype).removeprefix("torch."))
    x = x.detach().contiguous()
    return runtime.from_dlpack(x if x.data_ptr() % 64 == 0 else x.clone())
