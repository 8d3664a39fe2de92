"""Identity ops: copies, views of the same shape, gradient stops."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import (
    FREE,
    NO_GRADIENT,
    Attrs,
    Builder,
    Code,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    aten,
    define,
    onnx,
    operands,
    same_type,
)

define(
    "stop_gradient",
    Semantics(infer=same_type, torch="{0}", linear=(operands(0),)),
    Split("... -> ..."),
    cost=FREE,
    code=Code(relax="{0}"),
    gradient=NO_GRADIENT,
    traits={Trait.POINTWISE, Trait.TRIVIAL, Trait.VIEW},
)


# ATen spellings


@aten(
    "alias.default",
    "clone.default",
    "contiguous.default",
    "lift_fresh_copy.default",
    "positive.default",
    "resolve_conj.default",
    "resolve_neg.default",
)
def _identity(g: Builder, x: Value, *options: Any, **more: Any) -> Any:
    return x


@aten("detach.default", "detach_.default")
def _detach(g: Builder, x: Value) -> Any:
    return g.emit("stop_gradient", x) if "float" in x.tensor.dtype else x


# ONNX spellings


@onnx("Identity")
def _onnx_identity(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return x[0]
