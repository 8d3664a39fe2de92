"""What each op means: the op table, one family a file."""

# Each family enters its ops in the table when it is imported.
from distir_relax.ops import (  # noqa: F401
    attention,
    communication,
    composite,
    composite_onnx,
    contraction,
    gradient,
    identity,
    indexing,
    interpolate,
    normalization,
    parts,
    pointwise,
    pooling,
    program,
    reduction,
    resize,
    selection,
    shape,
    window,
)
from distir_relax.ops.builder import Builder, infer, tensor_type
from distir_relax.ops.check import check
from distir_relax.ops.expression import evaluate, is_zero, relax_expression, torch_expression
from distir_relax.ops.onnx_operands import OnnxOperands
from distir_relax.ops.registry import (
    OF_PROGRAMS,
    Cost,
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
from distir_relax.ops.rule import BLOCKED, PARALLEL, WINDOW, Factor, Rule, parse_rule
from distir_relax.ops.sliding import Window

__all__ = [
    "BLOCKED",
    "OF_PROGRAMS",
    "PARALLEL",
    "WINDOW",
    "Builder",
    "Cost",
    "Emitter",
    "Expansion",
    "Factor",
    "OnnxOperands",
    "OpDef",
    "Rule",
    "Window",
    "aten_spellings",
    "check",
    "define",
    "entries",
    "evaluate",
    "infer",
    "is_zero",
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
