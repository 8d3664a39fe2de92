"""The tvm backend's kernels, fusion and split into what runs once and what runs each time, op by op."""

from __future__ import annotations

import pytest
from op_samples import NO_WEIGHTS, check_against_reference, operand_data, sample_module, samples

from distir_relax.ir import Op, print_module
from distir_relax.layout import DeviceMesh
from distir_relax.ops import is_packable
from distir_relax.runtime.transports.threads import ThreadWorld

pytest.importorskip("tvm")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("part", range(6))
def test_every_op_means_in_the_tvm_backend_what_it_means_in_the_op_table(part: int) -> None:
    """Its operands are inputs, or weights from the second on, or all weights: those that kernels pack and constants
    are folded from when they are loaded. All of a part of the samples in one program, since kernels that are equal are
    compiled once in it. An instance of every op is in `test_to_relax.py`."""
    from distir_relax.runtime.backends.tvm import TvmProgram
    from distir_relax.runtime.backends.tvm.compile import ProgramText, compile_program

    module, ops = sample_module(samples()[part::6], weights_from=(NO_WEIGHTS, 1, 0))
    operands = operand_data(ops)
    data = {
        v.name: x for op, values in zip(ops, operands, strict=True) for v, x in zip(op.operands, values, strict=True)
    }
    names = [item.value.name for item in module.main.inputs]
    count = sum(item.role == "input" for item in module.main.inputs)
    compiled = compile_program(ProgramText(print_module(module), "main_0"))
    comm = ThreadWorld(DeviceMesh((1,), ("tp",))).communicator(0)
    program = TvmProgram(compiled, comm, names[:count], {}, {name: data[name] for name in names[count:]}, "samples")
    check_against_reference(ops, operands, program(*(data[name] for name in names[:count]), sizes={}), _tolerance)


def _tolerance(op: Op) -> float:
    """Kernels round the inputs of weights in 8 and 4 bits to 8 bits."""
    return 1e-2 if is_packable(op) and op.operands[1].tensor.dtype in ("int8", "uint8") else 3e-6
