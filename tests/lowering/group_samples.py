"""Instances of the ops that work on rows by their groups; see `op_samples`."""

from __future__ import annotations

from distir_relax.ir import Attribute, TensorType

X, Y, WEIGHTS = TensorType((5, 7), "float32"), TensorType((5, 4), "float32"), TensorType((3, 7, 4), "float32")
ROWS, GROUPS = TensorType((5,), "int64"), TensorType((3,), "int64")


def of_groups() -> list[tuple[str, list[TensorType], dict[str, Attribute]]]:
    """Instances as (op, operand types, attributes)."""
    return [
        ("grouped_matmul", [X, WEIGHTS, GROUPS, GROUPS], {}),
        ("grouped_weight_grad", [X, Y, GROUPS, GROUPS], {}),
        ("group_numbers", [], {"count": 3}),
        ("routed_matmul", [X, WEIGHTS, ROWS, GROUPS], {"count": 3}),
        ("routed_weight_grad", [X, Y, ROWS, GROUPS], {"count": 3}),
        ("dispatch_rows", [X, ROWS, GROUPS], {}),
        ("combine_rows", [X, ROWS, GROUPS], {}),
    ]
