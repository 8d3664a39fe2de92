"""Ten steps of a pipeline under mpirun, in the order of every schedule: losses and parameters are those of torch.

In float64, to 1e-8; a batch of 5 or 7, so that microbatches differ, with words that have no label.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import distir_relax as dr
from tests.families import FAMILIES, LENGTH, WORDS, Loss
from tests.runtime.processes import mpirun

STEPS, ROWS = 10, 7

# For so many ranks: strategies.
JOBS = {
    2: [
        "1/1/2/5",
        "1/1/2/3,schedule=gpipe",
        "1/1/2/4,schedule=interleaved,chunks=2",
        "1/1/2/5,schedule=zb-h1",
        "1/1/2/3,schedule=zb-h2",
        "1/1/2/5,schedule=zb-v,chunks=2",
        "1/1/2/5,schedule=dualpipe-v,chunks=2",
        "1/1/2/1",
    ],
    3: [
        "1/1/3/5,schedule=auto",
        "1/1/3/2",
        "1/1/3/7,schedule=zb-h1",
        "1/1/3/4,schedule=interleaved,chunks=2,checkpoint=block",
    ],
    4: ["1/1/4/3", "2/1/2/3,zero=1", "1/2/2/2,sequence_parallel"],
    6: ["3/1/2/2,zero=2", "1/3/2/3,checkpoint=selective"],
}


def gpt2() -> Loss:
    """Four blocks, and weights that the first stage and the last share."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=4, n_head=3, **none)
    torch.manual_seed(0)
    return Loss(transformers.GPT2LMHeadModel(config), own=False, use_cache=False).to(torch.float64).train()


def batches() -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(STEPS):
        torch.manual_seed(number)
        ids = torch.randint(0, WORDS, (ROWS, LENGTH))
        labels = ids.clone()
        labels[number % ROWS], labels[:, :2] = -100, -100
        found.append({"x": ids, "labels": labels})
    return found


def of_torch(model: Loss, data: list[dict[str, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of one process."""
    own = deepcopy(model)
    optimizer, losses = torch.optim.AdamW(own.parameters(), lr=1e-3), []
    for batch in data:
        optimizer.zero_grad()
        loss: Any = own(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in own.named_parameters()}


@pytest.mark.mpirun
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", JOBS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_schedule_trains_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    model, data = gpt2(), batches()
    losses, parameters = of_torch(model, data)
    names = {}
    for number, strategy in enumerate(JOBS[ranks]):
        example = (data[0]["x"], data[0]["labels"])
        step = dr.compile_training(model, optimizer=dr.AdamW(lr=1e-3), example_batch=example, strategy=strategy)
        assert step.plan.mesh.size == ranks
        step.save(tmp_path / f"{number}.dist", ("torch",))
        torch.save(data, tmp_path / f"{number}.pt")
        names = step.plan.imported.names
    done = mpirun(ranks, Path(__file__).with_name("ranks.py"), tmp_path, limit=180)
    assert done.returncode == 0, done.stderr
    for number in range(len(JOBS[ranks])):
        found, state = torch.load(tmp_path / f"{number}.found")
        torch.testing.assert_close(found, losses, rtol=1e-8, atol=1e-8)
        for name, tensor in parameters.items():
            torch.testing.assert_close(state[names[name]], tensor, rtol=1e-8, atol=1e-8)


def test_with_the_same_order_of_sums_the_bits_are_the_same() -> None:
    """In float32: microbatches one after the other, without a pipeline and with one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 17), nn.GELU(), nn.Linear(17, 5)) for _ in range(3)))
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    found = []
    for strategy in ("1/1/1/4", "1/1/2/4", "1/1/3/4,schedule=gpipe", "1/1/2/4,schedule=zb-v,chunks=2"):
        step = dr.compile_training(
            model, nn.functional.mse_loss, optimizer=dr.AdamW(lr=1e-2), example_batch=(x, y), strategy=strategy
        )
        losses = [step(x, y) for _ in range(4)]
        found.append((losses, {name: tensor.clone() for name, tensor in step.parameters().items()}))
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in parameters.items())


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
    step = dr.compile_training(model, optimizer=dr.SGD(lr=0.1), example_batch=args, strategy=strategy)
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
