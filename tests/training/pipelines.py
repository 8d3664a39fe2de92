"""GPT-2 in pipelines, in the order of every schedule: what ranks of a launch are to train, and what torch gives.

In float64; a batch of 7, so that microbatches differ, with words that have no label.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import distir_relax as dr
from tests.families import LENGTH, WORDS, Loss
from tests.imported_once import ImportedTraining

STEPS, ROWS = 5, 7
Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and parameters by name."""

# For so many ranks: strategies.
STRATEGIES = {
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


@cache
def of_torch() -> Trained:
    """Losses and parameters of one process."""
    own, data = gpt2(), batches()
    optimizer, losses = torch.optim.AdamW(own.parameters(), lr=1e-3), []
    for batch in data:
        optimizer.zero_grad()
        loss: Any = own(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in own.named_parameters()}


@cache
def imported() -> ImportedTraining:
    """The training that the strategies distribute."""
    batch = batches()[0]
    return ImportedTraining(
        dr.Training(gpt2(), optimizer=dr.optim.AdamW(lr=1e-3), example_batch=(batch["x"], batch["labels"]))
    )


def write_pipelines(ranks: int, folder: Path) -> Trained:
    """Write the bundles of all strategies for so many ranks and their batches; what torch has of each."""
    data = batches()
    losses, parameters = of_torch()
    names: dict[str, str] = {}
    for number, strategy in enumerate(STRATEGIES[ranks]):
        step = imported().compile(strategy=strategy)
        assert step.plan.mesh.size == ranks
        step.save(folder / f"pipeline{number}.dist", ("torch",))
        torch.save(data, folder / f"pipeline{number}.pt")
        names = step.plan.imported.names
    return losses, {names[name]: tensor for name, tensor in parameters.items()}
