"""Validate the facets of an entry for one op instance, so that passes can rely on them.

Operands and attributes may come from a user or from a file. The torch expression of an entry determines the number of
operands; the functions of the entry determine which attributes are valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.errors import VerificationError
from distir_relax.ir import TensorType
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.expression import check_expression, operand_count
from distir_relax.ops.table.table import lookup
from distir_relax.support import shown
from distir_relax.support.units import count


def check_operands(name: str, operands: Sequence[TensorType], attrs: Mapping[str, Any], location: str = "") -> None:
    """Raise `VerificationError` unless op `name` takes this number of operands."""
    try:
        expected = operand_count(name, attrs)
    except Exception:  # attributes that do not fit the expression: `check_facets` and `infer` say more
        return
    if expected is not None and expected != len(operands):
        raise VerificationError(f"{name} takes {count(expected, 'operand')}, found {len(operands)}", location)


def check_facets(
    name: str,
    operands: Sequence[TensorType],
    attrs: Mapping[str, Any],
    results: Sequence[TensorType],
    location: str = "",
    split: bool = False,
) -> None:
    """Raise `VerificationError` unless the facets of op `name` can be evaluated for these types and attributes.

    With `split`, evaluate its factor rule too, for programs that are not partitioned yet.
    """
    if problem := _problem(lookup(name, location), operands, attrs, results, split):
        types = ", ".join(map(str, operands))
        raise VerificationError(f"{name} cannot take ({types}) with {shown(dict(attrs))}: {problem}", location)


def _problem(
    entry: OpDef, operands: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType], split: bool
) -> str:
    try:
        check_expression(entry.name, attrs, len(operands))
        if split:
            entry.rule_for(operands, attrs, results)
        cost = entry.cost
        for facet in (cost.flops, cost.moved, cost.product, cost.workspace, cost.cpu_workspace):
            if facet is not None:
                facet(operands, attrs, results)
    except Exception as error:
        return f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
    return ""
