"""What each op means: the op table, one family a file."""

# Each family enters its ops in the table when it is imported.
from distir_relax.ops import (  # noqa: F401
    adaptive,
    attention,
    communication,
    composite,
    composite_math,
    composite_onnx,
    composite_relax,
    composite_shape,
    contraction,
    gradient,
    grouped,
    identity,
    indexing,
    interpolate,
    maxima,
    normalization,
    parts,
    points,
    pointwise,
    pooling,
    program,
    reduction,
    resample,
    resize,
    resize_onnx,
    scatter,
    scatter_calls,
    selection,
    shape,
    window,
)
from distir_relax.ops.builder import Builder, infer, tensor_type
from distir_relax.ops.check import check
from distir_relax.ops.data_dependent import HINT as DATA_DEPENDENT_HINT
from distir_relax.ops.data_dependent import REASON as DATA_DEPENDENT
from distir_relax.ops.data_dependent import is_data_dependent
from distir_relax.ops.expression import evaluate, is_zero, relax_expression, torch_expression, torch_in_place
from distir_relax.ops.numbers import number_range
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
from distir_relax.ops.sliding import StridedWindow, Window

__all__ = [
    "BLOCKED",
    "DATA_DEPENDENT",
    "DATA_DEPENDENT_HINT",
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
    "StridedWindow",
    "Window",
    "aten_spellings",
    "check",
    "define",
    "entries",
    "evaluate",
    "infer",
    "is_data_dependent",
    "is_zero",
    "lookup",
    "lookup_aten",
    "lookup_onnx",
    "lookup_relax",
    "number_range",
    "onnx_spellings",
    "parse_rule",
    "relax_expression",
    "tensor_type",
    "torch_expression",
    "torch_in_place",
]
