"""Ranges: start, start + step, and so on."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.table import (
    BLOCKED,
    FREE,
    Attrs,
    Builder,
    Code,
    Factor,
    Rule,
    Semantics,
    Split,
    Types,
    define,
    relax,
)


def _infer_arange(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not attrs["step"]:
        raise ValueError("expected a step other than 0")
    count = max(0, math.ceil((attrs["end"] - attrs["start"]) / attrs["step"]))
    return (TensorType((count,), attrs["dtype"]),)


def _arange_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    (count,) = results[0].shape
    return Rule((Factor("n", count, BLOCKED),), (), (((0,),),)) if count != 1 else Rule((), (), (((),),))


define(
    "arange",
    Semantics(infer=_infer_arange, torch="torch.arange({start}, {end}, {step}, dtype=torch.{dtype!s})"),
    Split(_arange_rule),
    cost=FREE,
    code=Code(relax="R.arange({start}, {end}, {step}, {dtype})"),
)


# Relax spellings


@relax("relax.arange")
def _relax_arange(g: Builder, args: Any, attrs: Attrs) -> Any:
    start, end, step = args
    return g.emit("arange", start=start, end=end, step=step, dtype=attrs["dtype"])
