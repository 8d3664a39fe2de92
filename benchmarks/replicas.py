"""The cost of comparing replicas of the state (`verify_replicas`), as a part of a training's steps.

    python benchmarks/replicas.py --models gpt2,llama --strategy 2/1/1/1 --every 100

Ranks are threads. Steps with a comparison and without take turns; what is printed is the median of their difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
import training_validation as models

import distir_relax as dr
from distir_relax.frontends.torch.loss_module import call_arguments
from distir_relax.runtime.replicas import difference, replicas_of

MODELS = {"gpt2": models.gpt2, "llama": models.llama, "mlp": models.mlp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama", help="some of gpt2, llama, mlp")
    parser.add_argument("--strategy", default="2/1/1/1")
    parser.add_argument("--every", default=100, type=int, help="steps between two comparisons")
    parser.add_argument("--pairs", default=15, type=int, help="steps with a comparison and without")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.models.split(","):
        torch.manual_seed(0)
        model, loss, batch = MODELS[name]()
        optimizer = dr.optim.AdamW(lr=1e-4)
        step = dr.compile_training(model, loss, optimizer=optimizer, example_batch=batch, strategy=options.strategy)
        inputs = step.numbers(step.plan.imported.flatten(*call_arguments(*batch, loss is not None)))
        session = step.plan.session("torch")
        replicas = replicas_of(session.bundle.manifest)
        size = sum(session.programs[r.ranks[0]].state[r.tensor.name].nbytes * len(r.ranks) for r in replicas)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(3 + options.pairs):
            for compares in seconds:
                begun = time.perf_counter()
                session(inputs)
                if compares:
                    error = difference(session, lambda value: [value], number)
                    assert error is None, error
                if number >= 3:
                    seconds[compares].append(time.perf_counter() - begun)
        taken = statistics.median(seconds[False])
        cost = statistics.median(b - a for a, b in zip(*seconds.values(), strict=True))
        print(
            f"{name:6} {options.strategy}: {size / 1e6:.0f} MB of replicas, step {1e3 * taken:.1f} ms, comparison "
            f"{1e3 * cost:.1f} ms, {size / cost / 1e9:.1f} GB/s, {cost / options.every / taken:.3%} of the steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
