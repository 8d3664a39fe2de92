"""Steps of a pipeline, ranks as threads: its bits do not depend on the stages, and other models have it too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from tests.families import FAMILIES


def test_with_the_same_order_of_sums_the_bits_are_the_same() -> None:
    """In float32: microbatches one after the other, without a pipeline and with one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 17), nn.GELU(), nn.Linear(17, 5)) for _ in range(3)))
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    found = []
    for strategy in ("1/1/1/4", "1/1/2/4", "1/1/3/4,schedule=gpipe", "1/1/2/4,schedule=zb-v,chunks=2"):
        step = dr.compile_training(
            model, nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=1e-2), example_batch=(x, y), strategy=strategy
        )
        losses = [step(x, y) for _ in range(4)]
        found.append((losses, {name: tensor.clone() for name, tensor in step.parameters().items()}))
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in parameters.items())


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy"), [("bert", "1/1/2/3"), ("vit", "1/1/3/2,schedule=zb-h1"), ("recurrent", "2/1/2/2")]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_models_in_stages(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]()
    model = family.model.to(torch.float64).train()
    args = tuple(a.double() if a.is_floating_point() else a for a in family.args)
    own = deepcopy(model)
    step = dr.compile_training(model, optimizer=dr.optim.SGD(lr=0.1), example_batch=args, strategy=strategy)
    for _ in range(2):
        loss: Any = own(*args)
        own.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in own.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else 0.0)
        assert step(args) == pytest.approx(loss.item(), abs=1e-9)
    found = step.parameters()
    for key, tensor in own.named_parameters():
        if key in found:
            torch.testing.assert_close(found[key], tensor.detach(), rtol=1e-8, atol=1e-8)
