"""Programs that bind a step compute what those that run op by op do: each op alone, with data that is new."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from distir_relax.kernels.bound_step import BoundStep
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.emit.torch import to_torch, to_torch_bound
from distir_relax.ops import lookup
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.runtime.transports.threads import ThreadWorld
from tests.lowering.op_samples import NO_WEIGHTS, Sample, data, sample_module, samples

SAMPLES = samples()


def run_twice(sample: Sample, weights_from: int) -> bool:
    """Run a program of one op and its bound step on two sets of data; return whether there is a step."""
    module, (op,) = sample_module([sample], (weights_from,))
    text = to_torch_bound(module, "main_0", "sample")
    if not text:
        return False
    comm = ThreadWorld(DeviceMesh((1,), ("alone",))).communicator(0, "cpu")
    loaded = load_text(to_torch(module, "sample")["main_0"], "sample", "<sample>")
    scope: dict[str, object] = {}
    exec(compile(text, "<bound>", "exec"), scope)
    inputs = module.function("main_0").inputs
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        of_inputs = [[data(i.value.tensor, op.name, generator) for i in inputs] for _ in range(3)]
        stored = {i.value.name: x for i, x in zip(inputs, of_inputs[0], strict=True) if i.role != "input"}
        weights = prepare_weights(loaded, comm, dict(stored))
        given = [[x for i, x in zip(inputs, values, strict=True) if i.role == "input"] for values in of_inputs]
        step = BoundStep()
        mine = [step.input(x) for x in given[0]]
        outputs = scope["bind"](comm, weights, step, *mine)  # type: ignore[operator]
        for values in given[1:]:
            expected = [x.clone() for x in tree_leaves(loaded.main(comm, weights, *(x.clone() for x in values)))]
            for buffer, x in zip(mine, values, strict=True):
                buffer.copy_(x)
            step.run()
            for found, wanted in zip(tree_leaves(outputs), expected, strict=True):
                tolerance = 1e-2 if wanted.dtype in (torch.float16, torch.bfloat16) else 2e-5
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    return True


@pytest.mark.parametrize("name", sorted({name for name, *_ in SAMPLES}))
def test_each_op(name: str) -> None:
    for sample in SAMPLES:
        if sample[0] == name:
            for weights_from in (NO_WEIGHTS, 1):
                is_bound = run_twice(sample, weights_from)
                assert is_bound == (not lookup(name).code.in_place)
