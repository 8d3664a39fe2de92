"""What is computed once, when a program is loaded, takes memory and no time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir_relax.cost.profile import Profile
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Module, parse, verify
from distir_relax.ops import check
from distir_relax.simulation.kept_values import as_executed, kept_storage
from distir_relax.simulation.memory_categories import WEIGHTS
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

CPU = replace(machine(2, bandwidth=1e9), kind="cpu")
SIZE = 67 * 6 * 4

MODULE = """module @distributed {
  mesh[0] = device_mesh((2,), ("tp",))
  func @main(
    input %x: f32[5,6] @ {0,1},
    input %ids: i64[5] @ {0,1},
    parameter %w: f32[67,6] @ {0,1},
    parameter %table: f32[67,6] @ {0,1},
    parameter %places: f32[500,6] @ {0,1},
  ) {
    %larger = exp(%w)
    %scores = linear(%x, %larger)
    %rows = take(%table, %ids) {axis=0}
    %more = linear(%rows, %table)
    %view = reshape(%w) {shape=(6, 67)}
    %first @ {0,1} = arange() {start=0, end=5, stride=1, dtype="int64"}
    %places.5 = take(%places, %first) {axis=0}
    %sum = add(%rows, %places.5)
    return "scores": %scores, "more": %more, "sum": %sum, "view": %view
  }
}
"""


def module_of(text: str = MODULE) -> Module:
    module = infer_types(parse(text))
    verify(module, check)
    return module


def run_ops(profile: Profile) -> list[str]:
    return [event.op.name for event, _ in simulate_module(module_of(), profile).events()]


def test_what_depends_on_weights_alone_takes_no_time() -> None:
    assert run_ops(CPU) == ["linear", "take", "linear", "add"]
    # A runtime that does not fold ops on shapes runs all ops.
    assert sorted(run_ops(replace(CPU, shape_op=1e-6))) == sorted(
        ["exp", "linear", "take", "linear", "arange", "take", "add"]
    )


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_weights_are_held_as_calls_need_them(kind: str) -> None:
    """One as it is, of which a view is needed, its exponential packed, a table as it is and packed, and five places."""
    profile = replace(CPU, kind=kind)
    module = as_executed(module_of(), profile)
    verify(module, check)
    kept = {v.name: v for v in kept_storage(module, module.main).values()}
    sizes = {name: value.local.bytes for name, value in kept.items()}
    tables = 2 if kind == "cpu" else 1
    assert sorted(sizes.values()) == sorted([5 * 6 * 4, *[SIZE] * (2 + tables)])
    assert "w" in kept, "the view has its memory"
    found = simulate_module(module, profile)
    assert found.memory_curve(0)[0][1][WEIGHTS] == sum(sizes.values())


def test_weights_that_a_step_updates_are_not_packed() -> None:
    text = MODULE.replace("%sum = add", "%new = assign(%table, %table)\n    %sum = add").replace(
        '"view": %view', '"view": %view, "new": %new'
    )
    module = as_executed(module_of(text), CPU)
    products = [op for op in module.main.ops if op.name == "linear"]
    # The other weight is frozen.
    assert [op.operands[1].local.form for op in products] == ["packed", ""]
