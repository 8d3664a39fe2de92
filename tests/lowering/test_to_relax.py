"""Emission to Relax: its text, its semantics op by op under TVM's own pipeline, and what it must not lose."""

from __future__ import annotations

import pytest
import torch
from op_samples import check_against_reference, local_ops, operand_data, sample_module, samples

from distir_relax import ir
from distir_relax.errors import VerificationError
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.emit.relax import to_relax, to_relax_programs
from distir_relax.runtime.backends.tvm.program import rank_function
from distir_relax.runtime.transports.threads import ThreadWorld

tvm = pytest.importorskip("tvm")

PARTIAL_SUM = """
module @ranked {
  mesh[0] = device_mesh((2,), ("tp",))
  ranks = (@main_0, @main_1,)
  func @main_0(
    input %x: f32[4,8],
    parameter %w: f32[5,8],
  ) {
    %y.partial: f32[4,5] = linear(%x, %w)
    %y: f32[4,5] = all_reduce(%y.partial) {axis="tp", op="sum", step=1}
    %unused: f32[8,5] = all_gather(%y) {axis="tp", dim=0, sizes=(4, 4), step=2}
    return "y": %y
  }
  func @main_1(
    input %x: f32[4,0],
    parameter %w: f32[5,0],
  ) {
    %h: f32[4,0] = nn.relu(%x)
    %y.partial: f32[4,5] = linear(%h, %w)
    %y: f32[4,5] = all_reduce(%y.partial) {axis="tp", op="sum", step=1}
    %unused: f32[8,5] = all_gather(%y) {axis="tp", dim=0, sizes=(4, 4), step=2}
    return "y": %y
  }
}
"""


def test_every_op_that_a_rank_runs_has_a_sample() -> None:
    assert local_ops() - {name for name, _, _ in samples()} == set()


def test_every_op_means_in_relax_what_it_means_in_the_op_table() -> None:
    from tvm import relax

    # One instance of each op: the backend compiles all of them (`test_to_relax_compiled.py`), emitted alike.
    module, ops = sample_module(list({sample[0]: sample for sample in samples()}.values()))
    # What an op means does not depend on how far LLVM optimises it, which takes most of the time.
    executable = relax.build(to_relax(module), tvm.target.Target({"kind": "llvm", "opt-level": 0}))
    operands = operand_data(ops)
    arguments = [tvm.runtime.tensor(x.numpy()) for values in operands for x in values]
    comm = ThreadWorld(DeviceMesh((1,), ("tp",))).communicator(0)
    results = rank_function(executable, "main_0", comm)(*arguments)
    check_against_reference(ops, operands, [torch.from_numpy(y.numpy()) for y in results], tolerance=1e-5)


def test_relax_text_shows_packed_communication_and_reads_back() -> None:
    from tvm import relax
    from tvm.script import from_source

    module = to_relax(ir.parse(PARTIAL_SUM))
    relax.analysis.well_formed(module)
    text = module.script()
    assert 'I.module_attrs({"distir.ranks": ["main_0", "main_1"]})' in text
    assert 'R.call_dps_packed("distir.all_reduce"' in text
    tvm.ir.assert_structural_equal(from_source(text), module)


def test_a_communication_whose_result_nobody_uses_stays() -> None:
    module = to_relax(ir.parse(PARTIAL_SUM))
    function = module["main_0"]
    assert len(function.ret_ty.fields) == 2
    assert int(function.attrs["distir.outputs"]) == 1


def test_each_program_is_a_module_of_its_own_with_the_texts_of_its_steps() -> None:
    [(name, function)] = to_relax_programs(ir.parse(PARTIAL_SUM))["main_1"].functions.items()
    assert name.name_hint == "main_1"
    assert [p.name for p in function.params] == ["x", "w"]
    assert str(function.attrs["distir.steps"]["1"]).startswith("%y: f32[4,5] = all_reduce(%y.partial)")


def test_only_ranked_programs_can_be_emitted() -> None:
    text = 'module @global {\n  func @main(\n    input %x: f32[2],\n  ) {\n    return "x": %x\n  }\n}\n'
    with pytest.raises(VerificationError, match="ranked stage, found the global stage"):
        to_relax(ir.parse(text))
