"""A stage that needs the whole of a value gathers it: parts are sent to it."""

from __future__ import annotations

from distir_relax.ir import parse, verify
from distir_relax.lowering.stage_placement import place_stages
from distir_relax.ops import check

TEXT = """
module @distributed {
  mesh[0] = device_mesh((3,), ("tp",))
  func @main(
    input %x: f32[6,5] @ {0..2},
    parameter %v: f32[5,5] @ {0..2},
    parameter %w: f32[5,5] @ {0..2},
  ) {
    %a: f32[6,5] @ {0..2} = call @first(%x, %v) on {0..2} {stage=0, kind="F", microbatch=0}
    %whole: f32[18,5] @ {0..2} = all_gather(%a) {axis="tp", dim=0, sizes=(6, 6, 6)}
    %b: f32[18,5] @ {0..2} = call @second(%whole, %w) on {0..2} {stage=1, kind="F", microbatch=0}
    %sum: f32[18,5] @ {0..2} = all_reduce(%b) {axis="tp", op="sum"}
    return "sum": %sum
  }
  func @first(input %x: f32[6,5] @ {0..2}, parameter %v: f32[5,5] @ {0..2}) {
    %a: f32[6,5] @ {0..2} = matmul(%x, %v)
    return "a": %a
  }
  func @second(input %x: f32[18,5] @ {0..2}, parameter %w: f32[5,5] @ {0..2}) {
    %b: f32[18,5] @ {0..2} = matmul(%x, %w)
    return "b": %b
  }
}
"""


def test_parts_are_sent_and_gathered_where_they_are_used() -> None:
    placed = place_stages(parse(TEXT), (0, 1))
    verify(placed, check)
    kinds = {op.name: (op.operands[0].placed, op.results[0].placed) for op in placed.main.ops if op.name != "call"}
    sent, gathered, added = kinds["send"], kinds["all_gather"], kinds["all_reduce"]
    assert [str(kind) for kind in sent] == ["f32[6,5] @ {0,1,2}", "f32[6,5] @ {3,4,5}"]
    assert [str(kind) for kind in gathered] == ["f32[6,5] @ {3,4,5}", "f32[18,5] @ {3,4,5}"]
    # What only adds stays where its operand is.
    assert [str(kind) for kind in added] == ["f32[18,5] @ {3,4,5}", "f32[18,5] @ {3,4,5}"]
    assert sum(op.name == "send" for op in placed.main.ops) == 1
