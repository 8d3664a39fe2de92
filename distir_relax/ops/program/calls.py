"""Function calls and stream synchronization."""

from __future__ import annotations

from distir_relax.ir import CALL, WAIT, TensorType
from distir_relax.ops.table import Attrs, Semantics, Trait, Types, define, same_type


def _infer_call(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    raise ValueError("the result types of a call are those of its function")


define(
    CALL,
    Semantics(infer=_infer_call, torch="{0}"),
    traits={Trait.CALL},
)
define(
    WAIT,
    Semantics(infer=same_type, torch="{0}"),
    traits={Trait.WAIT, Trait.TRIVIAL, Trait.VIEW},
)
