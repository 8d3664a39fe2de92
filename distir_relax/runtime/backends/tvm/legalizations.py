"""Legalizations of Relax ops by functions that LLVM vectorizes (`vector_functions`).

Those of narrow floats are computed in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from distir_relax.lowering.emit.relax_exact import NARROW
from distir_relax.runtime.backends.tvm.vector_functions import erf, exp, tanh


def legalizations() -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return the legalizations for `relax.transform.LegalizeOps` that use these functions."""

    def one(dtype: Any) -> Any:
        from tvm import tirx

        return tirx.const(1.0, dtype)

    def sigmoid(x: Any) -> Any:
        return one(x.ty.dtype) / (one(x.ty.dtype) + exp(-x))

    def gelu(x: Any) -> Any:
        half = x * _like(0.5, x)
        return half * (one(x.ty.dtype) + erf(x * _like(math.sqrt(0.5), x)))

    def gelu_tanh(x: Any) -> Any:
        inner = _like(math.sqrt(2.0 / math.pi), x) * (x + _like(0.044715, x) * x * x * x)
        return x * _like(0.5, x) * (one(x.ty.dtype) + tanh(inner))

    def silu(x: Any) -> Any:
        return x * sigmoid(x)

    functions = {"exp": exp, "tanh": tanh, "erf": erf, "sigmoid": sigmoid,
                 "nn.gelu": gelu, "nn.gelu_tanh": gelu_tanh, "nn.silu": silu}  # fmt: skip
    return {f"relax.{name}": _elementwise(name, function) for name, function in functions.items()}


def _elementwise(name: str, function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def legalize(builder: Any, call: Any) -> Any:
        from tvm import te

        dtype = str(call.args[0].ty.dtype)
        wide = "float32" if dtype in NARROW else dtype

        def compute(x: Any) -> Any:
            element = lambda *i: function(x(*i).astype(wide)).astype(dtype)  # noqa: E731
            return te.compute(x.shape, element, name=name.rsplit(".", 1)[-1])

        return builder.call_te(compute, call.args[0], primfunc_name_hint=name.rsplit(".", 1)[-1])

    return legalize


def _like(value: float, x: Any) -> Any:
    from tvm import tirx

    return tirx.const(value, x.ty.dtype)
