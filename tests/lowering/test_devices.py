"""Programs make their tensors on the rank's device. Torch's meta device tells here, where there is no other.

`tests/device_acceptance.py` runs programs on a real one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distir_relax.lowering.emit.torch import to_torch
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.support.torch_compat import tree_leaves
from tests.lowering.op_samples import NO_WEIGHTS, Sample, operand_data, sample_module, samples

META: Any = SimpleNamespace(device="meta", rank=0)
# They look at numbers, or are computed by TVM.
OF_NUMBERS = {"uniform", "check_indices", "grouped_matmul", "grouped_weight_grad", "routed_matmul",
              "routed_weight_grad", "quantized_grouped_matmul", "quantized_routed_matmul", "call_tir",
              "call_dps_packed"}  # fmt: skip
SAMPLES = [sample for sample in samples() if sample[0] not in OF_NUMBERS]


@pytest.mark.drawn(193)
@pytest.mark.parametrize("weights_from", [NO_WEIGHTS, 0])
@pytest.mark.parametrize("name", sorted({name for name, *_ in SAMPLES}))
def test_results_are_on_the_device(name: str, weights_from: int) -> None:
    for sample in SAMPLES:
        if sample[0] == name:
            for result in results(sample, weights_from):
                assert result.device.type == "meta", f"a result of {name} is on {result.device}"


def results(sample: Sample, weights_from: int) -> list[torch.Tensor]:
    """What the program of one op gives on the meta device."""
    module, ops = sample_module([sample], (weights_from,))
    (text,) = to_torch(module, "sample").values()
    loaded = load_text(text, "sample", "<sample>")
    inputs = module.function(module.ranks[0]).inputs
    tensors = [torch.empty_like(x, device="meta") for x in operand_data(ops)[0]]
    with torch.inference_mode():
        stored = {i.value.name: x for i, x in zip(inputs, tensors, strict=True) if i.role != "input"}
        given = [x for i, x in zip(inputs, tensors, strict=True) if i.role == "input"]
        found = loaded.main(META, prepare_weights(loaded, META, stored), *given)
    return [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
