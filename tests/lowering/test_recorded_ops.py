"""Recorded steps compute what programs that run op by op do: each op alone, with data that is new."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from distir_relax.kernels.native import STORED
from distir_relax.kernels.recorded_ops import recorded
from distir_relax.kernels.recording import Recording
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.ops import Trait, lookup
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.runtime.recorded_communicator import RecordedCommunicator
from distir_relax.runtime.transports.threads import ThreadWorld
from tests.lowering.op_samples import NO_WEIGHTS, Sample, data, sample_module, samples

SAMPLES = samples()


READS_ELEMENTS: set[str] = set()
"""Ops whose results have a shape that depends on elements."""


def check(sample: Sample, weights_from: int) -> None:
    """Record a program of one op, and run the step on two other sets of data."""
    module, (op,) = sample_module([sample], (weights_from,))
    world = ThreadWorld(DeviceMesh((1,), ("alone",)))
    comm = world.communicator(0, "cpu")
    loaded = load_text(to_torch(module, "sample")["main_0"], "sample", "<sample>")
    inputs = module.function("main_0").inputs
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        of_inputs = [[data(i.value.tensor, op.name, generator) for i in inputs] for _ in range(3)]
        stored = {i.value.name: x for i, x in zip(inputs, of_inputs[0], strict=True) if i.role != "input"}
        weights = prepare_weights(loaded, comm, dict(stored))
        given = [[x for i, x in zip(inputs, values, strict=True) if i.role == "input"] for values in of_inputs]
        step = Recording()
        mine = [step.input(x) for x in given[0]]
        with recorded(step):
            outputs = loaded.main(RecordedCommunicator(comm, step), weights, *mine)
        found = [[x.clone() for x in tree_leaves(outputs)]]
        if Trait.NATIVE in lookup(op.name).traits and step.native_calls + step.python_calls:
            is_plain = len({v.tensor for v in op.operands}) == 1 and op.operands[0].tensor.dtype in STORED
            assert not (is_plain and step.python_calls), (op.name, op.operands)
        for values in given[1:]:
            for buffer, x in zip(mine, values, strict=True):
                buffer.copy_(x)
            if not step.failure:
                step.run()
                found.append([x.clone() for x in tree_leaves(outputs)])
        for values, results in zip(given, found, strict=False):
            expected = [x.clone() for x in tree_leaves(loaded.main(comm, weights, *(x.clone() for x in values)))]
            for result, wanted in zip(results, expected, strict=True):
                tolerance = 1e-2 if wanted.dtype in (torch.float16, torch.bfloat16) else 2e-5
                torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert bool(step.failure) == (op.name in READS_ELEMENTS), (op.name, step.failure)


@pytest.mark.parametrize("name", sorted({name for name, *_ in SAMPLES}))
def test_each_op(name: str) -> None:
    for sample in SAMPLES:
        if sample[0] == name:
            for weights_from in (NO_WEIGHTS, 1):
                check(sample, weights_from)
