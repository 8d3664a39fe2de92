"""Families of models in training mode: loss and gradients against torch's autograd, whole, by data and by tensor."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from training import Training

from tests.families import FAMILIES


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_family_s_gradients_are_torch_s(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    dtype = torch.float32 if name == "mixtral" else torch.float64
    model = family.model.to(dtype).train()
    one = Training(deepcopy(model), family.args)
    loss = model(*family.args)
    loss.backward()
    expected = {"output": loss.detach()}
    expected |= {f"{one.imported.names[name]}.grad": p.grad for name, p in model.named_parameters()}
    inputs = [i.value.name for i in one.module.main.inputs if i.role == "input"]
    for found in (one.whole(), one.on_ranks(3, dict.fromkeys(inputs, "S[0]")), one.on_ranks(3, family.shardings)):
        state = {f"{name}.new": b for name, b in model.named_buffers() if f"{name}.new" in found}
        for name, tensor in {**expected, **state}.items():
            torch.testing.assert_close(found[name], tensor, rtol=family.tolerance, atol=family.tolerance)
