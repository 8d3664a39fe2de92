"""Weights that a program changes: each run begins with what the one before has left, functions and all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import PlacementError, RunError
from distir_relax.ir import parse
from distir_relax.runtime.session import Session

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
        assert text.count("= pack_linear(") == 1
    now = w.clone()
    for _ in range(3):
        found = plan(x, backend=backend)
        torch.testing.assert_close(found["y"], x @ now.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["z"], x @ v.T, rtol=1e-4, atol=1e-4)
        now -= 0.0625 * (x @ now.T).T @ x
        torch.testing.assert_close(found["w.new"], now, rtol=1e-4, atol=1e-4)


def stepping(layout: str = "S[0]") -> tuple[dr.Plan, torch.Tensor]:
    """A plan that changes a weight, and its input."""
    torch.manual_seed(0)
    module = parse(split_program(layout, "sgd(%w.s, %d) {rate=0.0625}"))
    return dr.compile((module, {"w": torch.randn(13, 5), "v": torch.randn(13, 5)})), torch.randn(7, 5)


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_state_is_read_and_written_between_runs(backend: str) -> None:
    plan, x = stepping()
    session = Session(plan.bundle((backend,)), backend)
    begin = session.state()
    assert list(begin) == ["w"]
    torch.testing.assert_close(begin["w"], plan.imported.tensors["w"], rtol=0, atol=0)
    first = session({"x": x}, outputs=("y",))
    assert list(first) == ["y"]
    after = session.state()["w"]
    torch.testing.assert_close(session({"x": x})["y"], x @ after.T, rtol=1e-4, atol=1e-4)
    session.load_state(begin)
    begin["w"].zero_()
    torch.testing.assert_close(session({"x": x}, outputs=["y"])["y"], first["y"], rtol=0, atol=0)
    torch.testing.assert_close(session.state()["w"], after, rtol=0, atol=0)


def test_other_state_than_the_program_changes_is_refused() -> None:
    plan, x = stepping("R")
    session = Session(plan.bundle(("torch",)))
    w = session.state()["w"]
    for wrong, words in (
        ({}, "the state is missing"),
        ({"w": w[1:]}, r"expected float32 \(13, 5\), found float32 \(12, 5\)"),
        ({"w": w.double()}, "expected float32"),
        ({"w": w, "v": w}, "changes no such weight"),
    ):
        with pytest.raises(RunError, match=words):
            session.load_state(wrong)
    with pytest.raises(RunError, match="the program has no such output"):
        session({"x": x}, outputs=("z", "loss"))
    torch.testing.assert_close(session.state()["w"], w, rtol=0, atol=0)


def test_a_session_that_failed_goes_on_from_state_that_it_is_given() -> None:
    plan, x = stepping()
    bundle = plan.bundle(("torch",))
    broken = {
        path: text.replace(
            "    return (", "    if comm.rank == 2 and x[0, 0] > 100: raise ValueError('broken')\n    return ("
        )
        for path, text in bundle.programs.items()
    }
    session = Session(replace(bundle, programs=broken))
    begin = session.state()
    expected = session({"x": x})
    with pytest.raises(ValueError, match="broken"):
        session({"x": x + 1000})
    with pytest.raises(RunError, match="between two steps"):
        session({"x": x})
    session.load_state(begin)
    for name, value in session({"x": x}).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_weight_lies_as_its_new_value_does() -> None:
    module = parse(split_program("R", "sgd(%w.s, %d.s) {rate=0.0625}").replace(
        "    %n:", '    %d.s: f32[13,5] = annotate_sharding(%d) {placements="S[0]"}\n    %n:'
    ))  # fmt: skip
    plan = dr.compile((module, {"w": torch.randn(13, 5), "v": torch.randn(13, 5)}))
    with pytest.raises(PlacementError, match=r"'w' is placed as R, and its new value as S\[0"):
        plan.bundle()
