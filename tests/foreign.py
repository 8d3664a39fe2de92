"""Functions of TVM's for samples: a `PrimFunc`, and a function registered with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from distir_relax.kernels.tvm_extern import packed_text

REGISTERED = "tests.turned"


def tir_attrs(rows: int, columns: int, dtype: str) -> dict[str, Any]:
    """The attributes of a `call_tir` of one operand, (rows, columns), which gives it twice as large, turned around."""
    source = _source(rows, columns, dtype)
    rule = {"rule": "d0 d1 -> d1 d0", "reduction": "sum"}
    return {"function": "turned", "source": source, **rule, **_result(rows, columns, dtype)}


def packed_attrs(rows: int, columns: int, dtype: str) -> dict[str, Any]:
    """The same by a registered function."""
    import tvm_ffi

    if tvm_ffi.get_global_func(REGISTERED, allow_missing=True) is None:
        tvm_ffi.register_global_func(REGISTERED, _turned)
    return {"function": REGISTERED, **_result(rows, columns, dtype)}


def _result(rows: int, columns: int, dtype: str) -> dict[str, Any]:
    return {"shapes": ((columns, rows),), "dtypes": (dtype,)}


def _turned(x: Any, y: Any) -> None:
    torch.from_dlpack(y).copy_(2 * torch.from_dlpack(x).T)


@cache
def _source(rows: int, columns: int, dtype: str) -> str:
    from tvm import te

    x = te.placeholder((rows, columns), dtype, "x")
    y = te.compute((columns, rows), lambda i, j: x[j, i] + x[j, i], "y")
    return packed_text(te.create_prim_func([x, y]))
