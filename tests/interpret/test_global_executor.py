"""The reference executor of the global stage."""

from __future__ import annotations

import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import parse

MAIN = parse(
    """
module @global {
  func @main(
    input %x: f32[2,4],
    parameter %w: f32[4,6],
  ) {
    %h: f32[2,6] = matmul(%x, %w)
    %a: f32[2,2], %b: f32[2,4] = split(%h) {sizes=(2, 4), axis=1}
    %c: f32[2,2] = multiply(%a, %a)
    return "c": %c, "h": %h, "x": %x
  }
}
"""
).main


def test_it_runs_op_by_op() -> None:
    x, w = torch.randn(2, 4), torch.randn(4, 6)
    found = interpret(MAIN, {"x": x, "w": w})
    assert list(found) == ["c", "h", "x"]
    torch.testing.assert_close(found["h"], x @ w)
    torch.testing.assert_close(found["c"], (x @ w)[:, :2] ** 2)
    assert found["x"] is x


def test_bad_inputs_are_named() -> None:
    with pytest.raises(RunError, match="expected a tensor for parameter 'w', found none"):
        interpret(MAIN, {"x": torch.ones(2, 4)})
    with pytest.raises(RunError, match=r"expected f32\[2,4\] for input 'x', found f64\[2,4\]"):
        interpret(MAIN, {"x": torch.ones(2, 4, dtype=torch.float64), "w": torch.ones(4, 6)})
