"""The table itself: what is entered late counts everywhere, and what is entered for a time is gone afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError, VerificationError
from distir_relax.ir import TensorType, verify
from distir_relax.ops import (
    TABLE,
    Code,
    Semantics,
    Split,
    Table,
    Trait,
    aten,
    check,
    entries,
    lookup,
    lookup_aten,
    operands,
    same_type,
)


class Gated(torch.nn.Module):
    """A product of activations, which no fused op of the table stands for."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * y


def run_ops() -> set[str]:
    """The ops that the ranks of a compiled `Gated` run; its result is compared with torch's."""
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    plan = dr.compile(Gated(), (x, y), shardings={"x": "S[0]"}, mesh=dr.DeviceMesh((2,), ("tp",)))
    torch.testing.assert_close(plan(x, y), Gated()(x, y))
    return {op.name for function in plan.modules["ranked"].functions for op in function.ops}


def define_gated_relu() -> None:
    dr.define_op(
        "lab.gated_relu",
        Semantics(infer=same_type, torch="torch.clamp({0}, min=0) * {1}", linear=(operands(1),)),
        Split("..., ... -> ..."),
        code=Code(patterns=("multiply(nn.relu(0), 1)",)),
        traits={Trait.POINTWISE},
    )


def test_a_fused_op_that_is_entered_late_is_used() -> None:
    assert run_ops() == {"nn.relu", "multiply"}
    with TABLE.extended():
        define_gated_relu()
        assert run_ops() == {"lab.gated_relu"}
    assert run_ops() == {"nn.relu", "multiply"}


def extend_and_fail() -> None:
    relu = lookup("nn.relu")
    with TABLE.extended():
        define_gated_relu()
        TABLE.replace(replace(relu, traits=frozenset()))
        aten("lab.gated_relu.default")(lambda g, x, y: g.emit("lab.gated_relu", x, y))
        assert lookup_aten("lab.gated_relu.default") is not None
        assert lookup("nn.relu") is not relu
        raise KeyError("in the middle")


def test_an_extension_is_gone_afterwards_also_when_it_fails() -> None:
    names, relu = [entry.name for entry in entries()], lookup("nn.relu")
    with pytest.raises(KeyError, match="in the middle"):
        extend_and_fail()
    assert [entry.name for entry in entries()] == names
    assert lookup("nn.relu") is relu
    assert lookup_aten("lab.gated_relu.default") is None
    with pytest.raises(UnsupportedOpError, match=r"there is no op 'lab.gated_relu'"):
        lookup("lab.gated_relu")


def test_what_is_derived_follows_each_change() -> None:
    table = Table()
    counted: list[int] = []

    def count(of: Table) -> int:
        counted.append(len(of.entries()))
        return counted[-1]

    assert (table.derived(count), table.derived(count), counted) == (0, 0, [0])
    table.define("one", Semantics(infer=same_type, torch="{0}"), Split("... -> ..."))
    assert (table.derived(count), table.derived(count), counted) == (1, 1, [0, 1])
    with table.extended():
        table.define("two", Semantics(infer=same_type, torch="{0}"), Split("... -> ..."))
        assert table.derived(count) == 2
    assert (table.derived(count), counted) == (1, [0, 1, 2, 1])


def test_names_are_taken_once() -> None:
    table = Table()
    table.define("one", Semantics(infer=same_type, torch="{0}"), Split("... -> ..."))
    with pytest.raises(ValueError, match="op 'one' is defined twice"):
        table.define("one", Semantics(infer=same_type, torch="{0}"), Split("... -> ..."))
    table.onnx("One")(lambda g, x, attrs: x[0])
    with pytest.raises(ValueError, match="the ONNX op One is converted twice"):
        table.onnx("One")(lambda g, x, attrs: x[0])
    with pytest.raises(UnsupportedOpError):
        table.replace(lookup("nn.relu"))


def test_traits_and_costs_agree() -> None:
    """A transfer communicates, the communicator performs what communicates, and the network knows what it is."""
    for entry in entries():
        communicates = Trait.COMMUNICATES in entry.traits
        assert communicates or Trait.TRANSFER not in entry.traits
        assert not communicates or Trait.ON_COMMUNICATOR in entry.traits
        assert communicates == bool(entry.cost.collective)


def test_what_was_found_right_is_looked_at_again_when_the_table_is_another() -> None:
    program = dr.compile(Gated(), (torch.randn(5, 4), torch.randn(5, 4)), mesh=3, shardings={"x": "S[0]"})
    entry = lookup("nn.relu")
    for stage in ("global", "distributed", "ranked"):
        verify(program.modules[stage], check)
        with TABLE.extended():
            refused = replace(entry.semantics, infer=lambda types, attrs: (TensorType((7,), types[0].dtype),))
            TABLE.replace(replace(entry, semantics=refused))
            with pytest.raises(VerificationError, match=r"nn\.relu gives"):
                verify(program.modules[stage], check)
        verify(program.modules[stage], check)
