"""What each op means: the op table, one family a file."""

from distir_relax.ops import (
    attention,
    communication,
    composite,
    composite_onnx,
    contraction,
    identity,
    indexing,
    parts,
    pointwise,
    reduction,
    selection,
    shape,
)
from distir_relax.ops.builder import Builder, infer, tensor_type
from distir_relax.ops.check import check
from distir_relax.ops.expression import evaluate, relax_expression, torch_expression
from distir_relax.ops.onnx_operands import OnnxOperands
from distir_relax.ops.registry import (
    Emitter,
    Expansion,
    OpDef,
    aten_spellings,
    define,
    entries,
    lookup,
    lookup_aten,
    lookup_onnx,
    lookup_relax,
    onnx_spellings,
)
from distir_relax.ops.rule import BLOCKED, PARALLEL, Factor, Rule, parse_rule

FAMILIES = (
    attention,
    communication,
    composite,
    contraction,
    identity,
    indexing,
    parts,
    pointwise,
    reduction,
    selection,
    shape,
)

__all__ = [
    "BLOCKED",
    "FAMILIES",
    "PARALLEL",
    "Builder",
    "Emitter",
    "Expansion",
    "Factor",
    "OnnxOperands",
    "OpDef",
    "Rule",
    "aten_spellings",
    "check",
    "define",
    "entries",
    "evaluate",
    "infer",
    "lookup",
    "lookup_aten",
    "lookup_onnx",
    "lookup_relax",
    "onnx_spellings",
    "parse_rule",
    "relax_expression",
    "tensor_type",
    "torch_expression",
]
