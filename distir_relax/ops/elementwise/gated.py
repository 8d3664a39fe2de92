"""Gated activations: an activation of one tensor times another, as in SwiGLU and GEGLU (Shazeer, 2020)."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.elementwise.pointwise import infer_common, pointwise_rule
from distir_relax.ops.table import Attrs, Code, Cost, Semantics, Split, Trait, Types, define, flops_per_result, operands


def _infer_equal(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len({t.shape for t in types}) != 1:
        raise ValueError(f"expected operands of one shape, found {[t.shape for t in types]}")
    return infer_common(types, attrs)


def _define_gated(name: str, activation: str, torch: str, relax: str, flops: float) -> None:
    define(
        name,
        Semantics(infer=_infer_equal, torch=torch, linear=(operands(1),)),
        Split(pointwise_rule),
        cost=Cost(flops=flops_per_result(flops + 1.0)),
        code=Code(relax=f"R.multiply({relax}, {{1}})", patterns=(f"multiply({activation}(0), 1)",)),
        traits={Trait.POINTWISE, Trait.NATIVE},
    )


_define_gated(
    "silu_multiply", "nn.silu", "elementwise.silu_multiply({0}, {1})", "R.nn.silu({0})", 10.0
)  # fmt: skip
_define_gated(
    "gelu_multiply", "nn.gelu", "elementwise.gelu_multiply({0}, {1})", "R.nn.gelu({0})", 12.0
)  # fmt: skip
_define_gated(
    "gelu_tanh_multiply", "nn.gelu_tanh", 'elementwise.gelu_multiply({0}, {1}, approximate="tanh")',
    "R.nn.gelu_tanh({0})", 12.0,
)  # fmt: skip
