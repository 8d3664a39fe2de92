"""Ops that several requests share: those whose factor rule is parallel along the new positions, and no others."""

from __future__ import annotations

from distir_relax.executable.request_rows import row_ops, rows_of
from distir_relax.ir import parse

TEXT = """
module @global {
  size last = 0..64 typically 1
  size new = 1..64 typically 5
  size past = 0..63 typically 8
  func @main(
    input %x: f32[1, new, 6],
    input %kept: f32[1, past, 6],
    parameter %weight: f32[4,6],
    parameter %shift: f32[6],
  ) {
    %linear: f32[1, new, 4] = linear(%x, %weight)
    %columns: f32[1, new, 6] = nn.softmax(%x) {axis=2}
    %rows: f32[1, new, 6] = nn.softmax(%x) {axis=1}
    %turned: f32[6, new, 1] = permute_dims(%x) {axes=(2, 1, 0)}
    %flat: f32[new, 6] = reshape(%x) {shape=(new, 6)}
    %all: f32[6*new] = reshape(%x) {shape=(6*new,)}
    %shifted: f32[1, new, 6] = add(%x, %shift)
    %own: f32[6] = sum(%x) {axes=(0, 1), keepdims=False}
    %shifted_2: f32[1, new, 6] = add(%x, %own)
    %twice: f32[6] = add(%shift, %shift)
    %total: f32[1, 6] = sum(%x) {axes=(1,), keepdims=False}
    %spread: f32[1, new, 6] = add(%x, %total)
    %places: i64[new] = arange() {start=past, end=new + past, step=1, dtype="int64"}
    %taken: f32[1, new, 6] = take(%x, %places) {axis=1}
    %joined: f32[1, new + past, 6] = append(%kept, %x) {axis=1}
    %turned_2: f32[1, 6, new] = permute_dims(%x) {axes=(0, 2, 1)}
    %square: f32[1, new, new] = matmul(%x, %turned_2)
    %final: f32[1, last, 6] = strided_slice(%x) {axes=(1,), begin=(new - last,), end=(new,), strides=(1,)}
    %scores: f32[1, last, 4] = linear(%final, %weight)
    return "scores": %scores
  }
}
"""


def test_what_runs_once() -> None:
    function = parse(TEXT).main
    found = row_ops(function, {"weight", "shift"})
    assert found.once == {"linear", "columns", "turned", "flat", "shifted", "twice", "turned_2", "scores"}
    assert found.shared == {"weight", "shift", "twice"}
    assert found.joined["turned"] == (1, "new")
    assert found.joined["flat"] == (0, "new")
    assert found.joined["scores"] == (1, "last")
    types = {v.name: v.tensor for op in function.ops for v in op.results}
    assert rows_of(types["square"]) is rows_of(types["all"]) is rows_of(types["joined"]) is None
