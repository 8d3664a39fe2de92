"""Steps of training on one process of one thread, ours and torch's own, in turn: medians and their ratio.

python benchmarks/training_step.py
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings

import torch
import training_validation as models

import distir_relax as dr

STEPS, WARM_UP = 15, 3


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for make in (models.gpt2, models.llama, models.vit, models.mlp):
        torch.manual_seed(0)
        model, loss, (inputs, targets) = make()
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
        step = dr.compile_training(model, loss, optimizer=dr.optim.AdamW(lr=1e-4), example_batch=(inputs, targets))
        theirs, ours = [], []
        for _ in range(WARM_UP + STEPS):
            begin = time.perf_counter()
            optimizer.zero_grad()
            found = loss(own(**inputs) if isinstance(inputs, dict) else own(inputs), targets)
            found.backward()
            optimizer.step()
            theirs.append(time.perf_counter() - begin)
            step(inputs, targets)
            ours.append(step.plan.session().seconds)
        a, b = (1e3 * statistics.median(taken[WARM_UP:]) for taken in (theirs, ours))
        print(f"{make.__name__:6} torch {a:6.1f} ms, ours {b:6.1f} ms: {b / a:.2f}", flush=True)


if __name__ == "__main__":
    main()
