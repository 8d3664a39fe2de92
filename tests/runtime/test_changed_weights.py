"""Weights that a program changes: each run begins with what the one before has left, functions and all."""

from __future__ import annotations

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import PlacementError
from distir_relax.ir import parse

PROGRAM = """module @global {{
  mesh[0] = device_mesh((3,), ("tp",))
  func @main(
    input %x: f32[7,5],
    parameter %w: f32[13,5],
    parameter %v: f32[13,5],
  ) {{
    %x.s: f32[7,5] = annotate_sharding(%x) {{placements="R"}}
    %w.s: f32[13,5] = annotate_sharding(%w) {{placements="{layout}"}}
    %y: f32[7,13] = linear(%x.s, %w.s)
    %z: f32[7,13] = linear(%x.s, %v)
    %d: f32[13,5] = linear_weight_grad(%y, %x.s)
    %n: f32[13,5] = {update}
    return "y": %y, "z": %z, "w.new": %n
  }}
  func @update(
    parameter %p: f32[13,5],
    input %g: f32[13,5],
  ) {{
    %p.new: f32[13,5] = sgd(%p, %g) {{rate=0.0625}}
    return "new": %p.new
  }}
}}
"""


def split_program(layout: str, update: str) -> str:
    """The text of the program, with its update in the entry function or in one that it calls."""
    text = PROGRAM.format(layout=layout, update=update)
    return text if "call" in update else text[: text.index("  func @update")] + "}\n"


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("update", ["call @update(%w.s, %d)", "sgd(%w.s, %d) {rate=0.0625}"])
def test_a_changed_weight_is_used_as_it_is_now(update: str, backend: str) -> None:
    torch.manual_seed(0)
    w, v, x = torch.randn(13, 5), torch.randn(13, 5), torch.randn(7, 5)
    module = parse(split_program("S[0]", update))
    plan = dr.compile((module, {"w": w, "v": v}))
    assert plan.bundle().manifest.updates == {"w": "w.new"}
    if backend == "torch":
        # The other weight, which nothing changes, is laid out once.
        (text, *_) = plan.bundle(("torch",)).programs.values()
        assert text.count("pack_linear(") == 1
    now = w.clone()
    for _ in range(3):
        found = plan(x, backend=backend)
        torch.testing.assert_close(found["y"], x @ now.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["z"], x @ v.T, rtol=1e-4, atol=1e-4)
        now -= 0.0625 * (x @ now.T).T @ x
        torch.testing.assert_close(found["w.new"], now, rtol=1e-4, atol=1e-4)


def test_a_weight_lies_as_its_new_value_does() -> None:
    module = parse(split_program("R", "sgd(%w.s, %d.s) {rate=0.0625}").replace(
        "    %n:", '    %d.s: f32[13,5] = annotate_sharding(%d) {placements="S[0]"}\n    %n:'
    ))  # fmt: skip
    plan = dr.compile((module, {"w": torch.randn(13, 5), "v": torch.randn(13, 5)}))
    with pytest.raises(PlacementError, match=r"'w' lies as R, and its new value as S\[0"):
        plan.bundle()
