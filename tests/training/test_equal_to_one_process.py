"""Training under mpirun: losses and all parameters are those of torch on one process.

Six steps of each family of models, and five of a pipeline in the order of every schedule. In float64, to 1e-8; but
for the mixture of experts, whose products torch has in float32 alone. Norms of Llama, which transformers computes in
float32 whatever the model's dtype, are torch's own here.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from tests.families import FAMILIES, WORDS, Family
from tests.runtime.processes import mpirun
from tests.training import pipelines

STEPS = 6
ADAM = dr.optim.AdamW(lr=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-3)
SGD = dr.optim.SGD(lr=0.02, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)

# For so many ranks: a family, a strategy ("space" splits images by rows), its optimizer.
JOBS: dict[int, list[tuple[str, str, Any]]] = {
    2: [("gpt2", "2/1/1/2,zero=1", ADAM), ("mixtral", "2/1/1/1,experts=data", SGD)],
    3: [("bert", "3/1/1/1,zero=2", ADAM), ("llama", "1/3/1/1", ADAM), ("resnet", "space", ADAM)],
    4: [("gpt2", "2/2/1/1,sequence_parallel", ADAM), ("recurrent", "2/2/1/1", SGD)],
    6: [("vit", "2/3/1/2,zero=3,checkpoint=selective", ADAM)],
}


def batches(name: str, family: Family) -> list[tuple[torch.Tensor, ...]]:
    """A batch of five samples for each step, no two alike."""
    found = []
    for number in range(STEPS):
        torch.manual_seed(number)
        x, labels = family.args
        if x.is_floating_point():
            found.append((torch.randn_like(x), torch.randint_like(labels, 7)))
            continue
        ids = torch.randint_like(x, WORDS)
        found.append((ids, torch.where(labels == -100, labels, ids)))
    return found


def with_own_norms(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            own = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=module.weight.dtype)
            model.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], own)
    return model


def made(name: str, strategy: str, optimizers: Any, path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Write the bundle and its batches; the losses and parameters that torch has."""
    torch.manual_seed(0)
    family = FAMILIES[name]()
    if name == "llama":
        family.model.own = False  # type: ignore[assignment]
    model = with_own_norms(family.model.to(torch.float32 if name == "mixtral" else torch.float64).train())
    ours, theirs = optimizers
    how: dict[str, Any] = {"shardings": {"x": "S[2]"}, "mesh": 3} if strategy == "space" else {"strategy": strategy}
    step = dr.compile_training(model, optimizer=ours, example_batch=family.args, **how)
    step.save(path, ("torch",))
    data = batches(name, family)
    torch.save([dict(zip(("x", "labels"), batch, strict=True)) for batch in data], path.with_suffix(".pt"))
    own = deepcopy(model)
    steps, losses = theirs(own.parameters()), []
    for batch in data:
        steps.zero_grad()
        loss = own(*batch)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, {step.plan.imported.names[n]: p.detach() for n, p in own.named_parameters()}


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", JOBS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    """In one launch, since ranks take seconds to start."""
    expected = {
        f"{number}": (*made(*job, tmp_path / f"{number}.dist"), 2e-4 if job[0] == "mixtral" else 1e-8)
        for number, job in enumerate(JOBS[ranks])
    }
    trained = pipelines.write_pipelines(ranks, tmp_path)
    expected |= {f"pipeline{number}": (*trained, 1e-8) for number in range(len(pipelines.STRATEGIES[ranks]))}
    done = mpirun(ranks, Path(__file__).with_name("ranks.py"), tmp_path, limit=200)
    assert done.returncode == 0, done.stderr
    for name, (losses, parameters, tolerance) in expected.items():
        found, state = torch.load(tmp_path / f"{name}.found")
        torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
        for key, tensor in parameters.items():
            torch.testing.assert_close(state[key], tensor, rtol=tolerance, atol=tolerance)
