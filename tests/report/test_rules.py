"""The op table in words."""

from __future__ import annotations

import re

import pytest

from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.ops import entries
from distir_relax.report.rules import explain_rule, parse_attrs, table


def test_the_table_has_every_op_of_a_model() -> None:
    rows = {row[0]: row[1:] for row in table()}
    assert rows["matmul"] == ("... m k, ... k n -> ... m n", "operand 0 or 1", "products.matmul({0}, {1})")
    assert rows["add"][1] == "operand 0 and 1 together"
    assert rows["nn.gelu"][:2] == ("each element by itself", "")
    assert "all_reduce" not in rows
    assert len(rows) > len(entries()) / 2


def test_a_product_explained() -> None:
    said = explain_rule("matmul", ["f32[4,5]", "f32[5,6]"])
    assert "f32[4,5], f32[5,6] -> f32[4,6]" in said
    assert re.search(r"m \(4\): dim 0 of operand 0, dim 0 of the result: may be split; each device", said)
    assert re.search(r"k \(5\): dim 1 of operand 0, dim 0 of operand 1: may be split; the result is I\[sum\]", said)
    assert "a partial sum may pass: operand 0 or 1" in said


def test_a_factor_of_one_result_that_is_summed_in_others() -> None:
    kinds = ["f32[2,3,5,7]", "f32[2,3,6,7]", "f32[2,3,6,4]", "f32[2,3,5,4]"]
    said = explain_rule("attention_grad", kinds, parse_attrs(["causal=False", "masked=False"]))
    assert re.search(r"s \(5\): .*dim 2 of result 0: may be split; results without it are I\[sum\]", said)
    assert re.search(r"h \(3\): .*dim 1 of result 2: may be split; each device computes its part", said)


def test_what_must_be_whole_is_said() -> None:
    said = explain_rule("flip", ["f32[4,6]"], parse_attrs(["axis=1"]))
    assert re.search(r"\(6\): dim 1 of operand 0, dim 1 of the result: must be whole on one device", said)
    assert re.search(r"\(4\): dim 0 of operand 0, dim 0 of the result: may be split", said)


@pytest.mark.parametrize("name", ["linear", "add", "where", "nn.relu"])
def test_an_instance_is_made_up_where_the_rule_alone_allows_it(name: str) -> None:
    assert "may be split" in explain_rule(name)


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "message"),
    [
        ("reshape", [], [], "depends on shapes and attributes"),
        ("matmul", ["f32[4,5]", "f32[4,5]"], [], "matmul cannot take"),
        ("matmul", ["f32(4,5)"], [], "expected an operand's type"),
        ("nn.softmax", ["f32[4]"], ["axis"], "expected key=value"),
    ],
)
def test_what_cannot_be_explained(name: str, operands: list[str], attrs: list[str], message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        explain_rule(name, operands, parse_attrs(attrs))


def test_an_unknown_op() -> None:
    with pytest.raises(UnsupportedOpError, match="no op 'matmull'"):
        explain_rule("matmull")
    with pytest.raises(UnsupportedOpError, match="no rule"):
        explain_rule("slices", ["f32[4]"], {"dim": 0, "intervals": ((0, 2),)})


def test_what_a_collective_needs_is_said() -> None:
    said = explain_rule("all_reduce")
    assert "  axis: the mesh axis" in said
    assert "  op: how terms are joined: sum, mean, min or max" in said
