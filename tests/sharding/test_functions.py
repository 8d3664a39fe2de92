"""Functions are laid out, lowered and projected as if they were written out: random programs with a part taken out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distir_relax.interpret import execute, interpret
from distir_relax.ir import (
    CALL,
    Function,
    Input,
    Module,
    Op,
    Output,
    Reason,
    Value,
    inline,
    parse,
    print_module,
    verify,
)
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.ops import check
from distir_relax.sharding import DelayReductions, Propagate, list_reshards
from tests.blocks import blocks_module
from tests.programs import Program
from tests.test_random_programs import MESHES, SETTINGS, programs, propagate


def taken_out(module: Module, start: int, stop: int) -> Module:
    """The module with its ops from `start` to `stop` as a function; all that they give is given."""
    main = module.main
    ops = main.ops[start:stop]
    made = [v for op in ops for v in op.results]
    taken = list(dict.fromkeys(v for op in ops for v in op.operands if v not in made))
    outside = {v for op in main.ops[stop:] for v in op.operands} | {o.value for o in main.outputs}
    given_ = [v for v in made if v in outside]
    function = Function("part", tuple(Input(v) for v in taken), ops, tuple(Output(v.name, v) for v in given_))
    call = Op(CALL, tuple(taken), tuple(given_), {"callee": "part"}, "part")
    if not given_:
        return module
    return replace(module, functions=(replace(main, ops=(*main.ops[:start], call, *main.ops[stop:])), function))


def lines(module: Module) -> Counter[str]:
    """The ops of a program that reach its outputs, names and places left out."""
    main = inline(module).main
    found: Counter[str] = Counter()
    used = {o.value.name for o in main.outputs}
    for op in reversed(main.ops):
        if used & {v.name for v in op.results}:
            used |= {v.name for v in op.operands}
            types = [[str(v.type) for v in values] for values in (op.operands, op.results)]
            found[f"{op.name} {types} {dict(op.attrs)}"] += 1
    return found


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("name", ["3", "5", "2x3"])
def test_a_part_taken_out_changes_nothing(name: str, tail: str) -> None:
    @settings(SETTINGS, max_examples=40, derandomize=True)
    @given(programs(MESHES[name]), st.data())
    def run(program: Program, data: st.DataObject) -> None:
        count = len(program.module.main.ops)
        start = data.draw(st.integers(0, count - 1))
        module = taken_out(program.module, start, data.draw(st.integers(start + 1, count)))
        verify(module, check)
        whole, sharded = propagate(program), propagate(replace(program, module=module))
        assert lines(sharded) == lines(whole)
        distributed = ToDistIR(tail).run(DelayReductions().run(sharded))
        ranked = FuseLocal().run(Project().run(distributed))
        for stage in (sharded, distributed, ranked):
            verify(stage, check)
            verify(inline(stage), check)
            assert parse(print_module(stage)) == stage
        expected, found = interpret(module, program.tensors), execute(sharded, distributed, program.tensors)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)

    run()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["3", "2x3"])
def test_one_function_called_twice_is_laid_out_once(name: str) -> None:
    """Two copies of a program's inputs, and the program as a function, called with each."""

    @settings(SETTINGS, max_examples=40, derandomize=True)
    @given(programs(MESHES[name]))
    def run(program: Program) -> None:
        body = replace(program.module.main, name="part")
        inputs = [Input(Value(f"{i.value.name}.{n}", i.value.type), i.role) for n in range(2) for i in body.inputs]
        half = len(body.inputs)
        ops = tuple(
            Op(
                CALL,
                tuple(i.value for i in inputs[n * half : (n + 1) * half]),
                tuple(Value(f"{o.name}.{n}", o.value.type) for o in body.outputs),
                {"callee": "part"},
            )
            for n in range(2)
        )
        outputs = tuple(Output(v.name, v) for op in ops for v in op.results)
        module = replace(program.module, functions=(Function("main", tuple(inputs), ops, outputs), body))
        tensors = {f"{name}.{n}": tensor * (n + 1) if tensor.is_floating_point() else tensor
                   for n in range(2) for name, tensor in program.tensors.items()}  # fmt: skip
        sharded = propagate(Program(module, tensors))
        assert len(sharded.functions) <= 2
        assert lines(sharded) == lines(Propagate().run(inline(module)))
        expected, found = interpret(module, tensors), execute(sharded, ToDistIR("pad").run(sharded), tensors)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)

    run()


def test_what_functions_need_is_brought_about_once_by_their_caller() -> None:
    """Both calls need the whole of a mask that lies in parts: it is gathered once, before the first."""
    module = parse("""
module @global {
  mesh[0] = device_mesh((3,), ("tp",))
  func @main(input %x: f32[7,5], input %mask: f32[7,5]) {
    %mask.split: f32[7,5] = annotate_sharding(%mask) {placements="S[1]"}
    %y: f32[7,5] = call @block(%x, %mask.split)  # blocks.0
    %z: f32[7,5] = call @block(%y, %mask.split)  # blocks.1
    return "z": %z
  }
  func @block(input %x: f32[7,5], input %mask: f32[7,5]) {
    %weights: f32[7,5] = flip(%mask) {axis=1}  # flip, model.py:3
    %y: f32[7,5] = multiply(%x, %weights)  # model.py:4
    return "y": %y
  }
}
""")
    sharded = Propagate().run(module)
    assert [op.name for op in sharded.main.ops].count("redistribute") == 1
    assert lines(sharded) == lines(Propagate().run(inline(module)))
    (moved,) = (m for m in list_reshards(sharded) if m.bytes)
    assert (moved.function, moved.times) == ("main", 1)


def test_reasons_are_those_of_the_first_call() -> None:
    sharded = Propagate().run(blocks_module(3))
    reasons = [r for r in sharded.records if isinstance(r, Reason) and r.function == "feed_forward"]
    assert {r.value for r in reasons} >= {"up", "down", "gelu"}
    assert {r.annotation for r in reasons} == {"blocks.0, model.py:7"}
    assert {r.source for r in reasons if r.value == "gelu"} == {"matmul"}
    (moved,) = list_reshards(sharded)
    assert (moved.function, moved.result, moved.times) == ("feed_forward", "matmul_1", 3)
