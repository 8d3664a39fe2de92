"""Programs of the distributed stage as a language: calls, device sets, streams, layouts, types left out."""

from __future__ import annotations

import pytest
import torch

from distir_relax.errors import VerificationError
from distir_relax.interpret.distributed_executor import execute_program, run_devices
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import CALL, Function, Module, inline, parse, print_module, verify
from distir_relax.ops import check

TYPED = """
module @distributed {
  mesh[0] = device_mesh((3,), ("dp",))
  func @main(
    input %x: f64[3|2|0,5] @ {0,1,2} as R.DTensor((5, 5), "float64", "mesh[0]", "S[0: 3|2|0]"),
    parameter %w: f64[5,5] @ {0,1,2} as R.DTensor((5, 5), "float64", "mesh[0]", "R"),
  ) {
    %h: f64[3|2|0,5] @ {0,1,2} = call @twice(%x, %w) on {0,1,2}  # model.py:4
    %s: f64[3|2|0,5] @ {0,1,2} = all_reduce(%w) {axis="dp", op="sum", stream="comm"}  # model.py:5
    return "h": %h as R.DTensor((5, 5), "float64", "mesh[0]", "S[0: 3|2|0]")
  }
  func @twice(
    input %x: f64[3|2|0,5] @ {0,1,2},
    parameter %w: f64[5,5] @ {0,1,2},
  ) {
    %a: f64[3|2|0,5] @ {0,1,2} = call @layer(%x, %w) on {0,1,2}
    %b: f64[3|2|0,5] @ {0,1,2} = call @layer(%a, %w) on {0,1,2}
    return "b": %b
  }
  func @layer(
    input %x: f64[3|2|0,5] @ {0,1,2},
    parameter %w: f64[5,5] @ {0,1,2},
  ) {
    %z: f64[3|2|0,5] @ {0,1,2} = matmul(%x, %w)
    %h: f64[3|2|0,5] @ {0,1,2} = nn.relu(%z)
    return "h": %h
  }
}
""".replace("    %s: f64[3|2|0,5]", "    %s: f64[5,5]")

UNTYPED = """
module @distributed {
  mesh[0] = device_mesh((2,), ("stage",))
  func @main(
    input %x: f64[3,5] @ {0},
    parameter %w: f64[5,5] @ {0},
    parameter %v: f64[5,7] @ {1},
  ) {
    %h = call @layer(%x, %w) on {0}
    %far @ {1} = send(%h) {stream="comm"}  # model.py:3
    %ready = wait(%far)
    %y = call @layer(%ready, %v) on {1}
    return "y": %y
  }
  func @layer(input %x, parameter %w) {
    %z = matmul(%x, %w)
    %h = nn.relu(%z)
    return "h": %h
  }
}
"""


@pytest.mark.parametrize("text", [TYPED, UNTYPED], ids=["typed", "untyped"])
def test_text_round_trips(text: str) -> None:
    module = parse(text)
    printed = print_module(module)
    assert parse(printed) == module
    assert print_module(parse(printed)) == printed


def test_a_typed_program_prints_as_it_was_written() -> None:
    assert print_module(parse(TYPED)) == TYPED.lstrip()


def test_types_left_out_are_found_and_print() -> None:
    module = infer_types(parse(UNTYPED))
    verify(module, check)
    assert parse(print_module(module)) == module
    types = {v.name: str(v.type) for op in module.main.ops for v in op.results}
    assert types == {
        "h": "f64[3,5] @ {0}", "far": "f64[3,5] @ {1}", "ready": "f64[3,5] @ {1}", "y": "f64[3,7] @ {1}"
    }  # fmt: skip
    assert infer_types(module) == module


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("call @twice(%x, %w) on {0,1,2}", "call @thrice(%x, %w) on {0,1,2}", "model.py:4: .* found @thrice"),
        ("call @layer(%a, %w)", "call @twice(%a, %w)", "does not call itself, found main -> twice -> twice"),
        ("%z: f64[3|2|0,5] @ {0,1,2} = matmul(%x, %w)", "%z: f64[3|2|0,5] @ {0,1,2} = call @twice(%x, %w) on {0,1,2}",
         "does not call itself, found main -> twice -> layer -> twice"),
        ("call @twice(%x, %w)", "call @twice(%w, %x)",
         r"model.py:4: %x of @twice is f64\[3\|2\|0,5\] @ {0,1,2} in this call, found %w: f64\[5,5\]"),
        ("call @twice(%x, %w)", "call @twice(%x)", "@twice takes 2 values and gives 1, found 1 and 1"),
        ("%h: f64[3|2|0,5] @ {0,1,2} = call", "%h: f64[3|2|1,5] @ {0,1,2} = call",
         r"%b of @twice is f64\[3\|2\|0,5\] @ {0,1,2} in this call, found %h: f64\[3\|2\|1,5\]"),
        ("call @twice(%x, %w) on {0,1,2}", "call @twice(%x, %w) on {0,1}", "is not on the devices {0,1}"),
        ("call @twice(%x, %w) on {0,1,2}", "call @twice(%x, %w) on {1,2,3}", r"is on devices {1,2,3}, the mesh has 3"),
        ("call @twice(%x, %w) on {0,1,2}", "call @twice(%x, %w) on {0,2,1}", r"ascending order, found {0,2,1}"),
        ('return "h": %h as R.DTensor((5, 5), "float64", "mesh[0]", "S[0: 3|2|0]")', 'return "s": %s',
         "output 's' is still on a stream, expected a wait"),
        ("stream=\"comm\"}  # model.py:5\n",
         "stream=\"comm\"}\n    %t: f64[5,5] @ {0,1,2} = add(%s, %w)  # model.py:6\n",
         "model.py:6: %s is computed on stream 'comm' of @main\n.*wait for it first: %ready = wait\\(%s\\)"),
    ],
)  # fmt: skip
def test_what_a_call_and_a_stream_may_not_do(old: str, new: str, message: str) -> None:
    verify(parse(TYPED), check)
    assert old in TYPED
    with pytest.raises(VerificationError, match=message):
        verify(parse(TYPED.replace(old, new)), check)


def test_a_call_takes_nothing_that_is_still_on_a_stream() -> None:
    module = infer_types(parse(UNTYPED.replace("@layer(%ready, %v)", "@layer(%far, %v)")))
    with pytest.raises(VerificationError, match=r"%far is computed on stream 'comm' of @main"):
        verify(module, check)


def test_a_stream_goes_on_without_a_wait() -> None:
    more = 'stream="comm"}\n    %t: f64[5,5] @ {0,1,2} = multiply(%s, %s) {stream="comm"}\n'
    verify(parse(TYPED.replace('stream="comm"}  # model.py:5\n', more)), check)


TWICE = """
module @global {
  func @main(
    input %x: f32[3,5],
    parameter %w: f32[5,5],
    parameter %v: f32[5,5],
  ) {
    %y: f32[3,5] = call @block(%x, %w)  # blocks.0
    %y_1: f32[3,5] = call @block(%y, %v)  # blocks.1
    return "y": %y_1
  }
  func @block(
    input %x: f32[3,5],
    parameter %w: f32[5,5],
  ) {
    %z: f32[3,5] = matmul(%x, %w)  # up, model.py:7
    %h: f32[3,5] = nn.relu(%z)  # model.py:8
    return "h": %h
  }
}
"""
SHARDED = (
    TWICE.replace("@global {", '@sharded {\n  mesh[0] = device_mesh((3,), ("tp",))')
    .replace("f32[3,5]", 'R.DTensor((3, 5), "float32", "mesh[0]", "S[0: 2|1|0]")')
    .replace("f32[5,5]", 'R.DTensor((5, 5), "float32", "mesh[0]", "R")')
)
RANKED = TWICE.replace(
    "@global {", '@ranked {\n  mesh[0] = device_mesh((3,), ("tp",))\n  ranks = (@main, @main, @main,)'
)


@pytest.mark.parametrize("text", [TWICE, SHARDED, RANKED], ids=["global", "sharded", "ranked"])
def test_functions_are_called_at_every_stage(text: str) -> None:
    module = parse(text)
    verify(module, check)
    assert print_module(module) == text.lstrip()
    flat = inline(module)
    verify(flat, check)
    assert [(op.name, op.location) for op in flat.main.ops] == [
        ("matmul", "blocks.0.up, model.py:7"), ("nn.relu", "blocks.0, model.py:8"),
        ("matmul", "blocks.1.up, model.py:7"), ("nn.relu", "blocks.1, model.py:8"),
    ]  # fmt: skip
    assert flat.main.ops[2].operands == (flat.main.ops[1].results[0], module.main.inputs[2].value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("call @block(%x, %w)", "call @block(%w, %x)", r"blocks.0: %x of @block is f32\[3,5\] in this call"),
        ("call @block(%x, %w)", "call @block(%x, %w) on {0}", "found @block on some in the global stage"),
        ("call @block(%x, %w)", "call @block(%x, %w, %v)", "@block takes 2 values and gives 1, found 3 and 1"),
        ("call @block(%x, %w)", "call @main(%x, %w)", "does not call itself, found main -> main"),
    ],
)
def test_what_a_call_of_the_global_stage_may_not_do(old: str, new: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(parse(TWICE.replace(old, new)), check)


def test_a_call_of_the_distributed_stage_names_its_devices() -> None:
    text = TYPED.replace("call @twice(%x, %w) on {0,1,2}", "call @twice(%x, %w)")
    with pytest.raises(VerificationError, match=r"model.py:4: .* found @twice on none in the distributed stage"):
        verify(parse(text), check)


def test_every_rank_is_written_out() -> None:
    text = RANKED.replace("(@main, @main, @main,)", "(@main, @other, @main,)")
    other = TWICE[TWICE.index("  func @main") : TWICE.index("  func @block")].replace("@main", "@other")
    flat = inline(parse(text.replace("  func @block", f"{other}  func @block")))
    verify(flat, check)
    assert [f.name for f in flat.functions] == ["main", "other"]
    assert [len(f.ops) for f in flat.functions] == [4, 4]


def test_inline_writes_the_same_ops_in_the_same_order() -> None:
    module = infer_types(parse(UNTYPED))
    flat = inline(module)
    verify(flat, check)
    assert [f.name for f in flat.functions] == ["main"]
    assert [op.name for op in flat.main.ops] == ["matmul", "nn.relu", "send", "wait", "matmul", "nn.relu"]
    assert [str(op.results[0].type) for op in flat.main.ops] == [
        "f64[3,5] @ {0}", "f64[3,5] @ {0}", "f64[3,5] @ {1}", "f64[3,5] @ {1}", "f64[3,7] @ {1}", "f64[3,7] @ {1}"
    ]  # fmt: skip
    assert flat.main.inputs == module.main.inputs
    assert inline(flat) is flat


def test_calls_within_calls_on_other_devices_are_written_out() -> None:
    text = TYPED.replace("on {0,1,2}", "on {1,3,6}").replace("(3,)", "(7,)")
    head, rest = text.split("  func @twice")
    module = parse(head.replace("@ {0,1,2}", "@ {1,3,6}") + "  func @twice" + rest.replace("on {1,3,6}", "on {0,1,2}"))
    flat = inline(module)
    assert [(op.name, str(op.results[0].type)) for op in flat.main.ops if op.name != "all_reduce"] == [
        ("matmul", "f64[3|2|0,5] @ {1,3,6}"), ("nn.relu", "f64[3|2|0,5] @ {1,3,6}")
    ] * 2  # fmt: skip


def _order(module: Module, function: Function) -> list[str]:
    found: list[str] = []
    for op in function.ops:
        found += _order(module, module.function(str(op.attrs["callee"]))) if op.name == CALL else [op.name]
    return found


def test_the_reference_executor_agrees_before_and_after_inlining() -> None:
    generator = torch.Generator().manual_seed(0)
    module = parse(TYPED)
    assert [op.name for op in inline(module).main.ops] == _order(module, module.main)
    x, w = (torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = ((x @ w).relu() @ w).relu()
    for program in (module, inline(module)):
        found = execute_program(program, {"x": x, "w": w})["h"]
        assert found.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_call_is_executed_on_the_devices_that_it_names() -> None:
    module = infer_types(parse(UNTYPED))
    generator = torch.Generator().manual_seed(1)
    x, w, v = (torch.randn(3, 5, generator=generator, dtype=torch.float64),
               torch.randn(5, 5, generator=generator, dtype=torch.float64),
               torch.randn(5, 7, generator=generator, dtype=torch.float64))  # fmt: skip
    found = run_devices(module, {"x": {0: x}, "w": {0: w}, "v": {1: v}})["y"]
    assert list(found) == [1]
    torch.testing.assert_close(found[1], ((x @ w).relu() @ v).relu(), rtol=0, atol=1e-12)


def test_a_program_that_calls_itself_is_not_written_out() -> None:
    module = parse(TYPED.replace("call @layer(%a, %w)", "call @twice(%a, %w)"))
    with pytest.raises(VerificationError, match="found main -> twice -> twice"):
        inline(module)
