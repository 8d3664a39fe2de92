"""Time and peak memory of import, simulation and search of Llamas of 8B and 70B parameters, on long sequences.

``python benchmarks/real_sizes.py``; each case runs in a process of its own. Weights have no data. The trainings are
some of those that torchtitan publishes figures of.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    import distir_relax as dr

CASES = (
    ("run", "8B", 16, 8192, "8/1/1/1,zero=3"),
    ("run", "8B", 512, 8192, "8/1/1/1,zero=3"),
    ("run", "8B", 1, 131072, "1/8/1/1"),
    ("train", "8B", 16, 8192, "8/1/1/1,zero=3,checkpoint=selective"),
    ("train", "8B", 8, 8192, "1/8/1/1,checkpoint=block"),
    ("train", "8B", 256, 8192, "128/1/1/1,zero=3,checkpoint=selective"),
    ("train", "70B", 512, 8192, "32/8/1/1,zero=3,checkpoint=block,sequence_parallel"),
    ("search", "8B", 64, 4096, "8 devices"),
)
"""What is done with which model, samples, tokens of each, and the strategy."""
SIZES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}
"""Hidden and intermediate size, layers, and heads."""
NODE = 8
"""Devices of a node."""


def main() -> None:
    """Run all cases, and print a table."""
    for case in CASES:
        subprocess.run([sys.executable, "-W", "ignore", __file__, *map(str, case)], check=True)


def run(kind: str, name: str, samples: int, tokens: int, strategy: str) -> None:
    """Import the model and simulate a strategy, or search; print seconds and the peak memory of all processes."""
    import torch
    import transformers

    import distir_relax as dr

    start = time.perf_counter()
    hidden, intermediate, layers, heads = SIZES[name]
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.zeros(samples, tokens, dtype=torch.int64)
    if kind == "search":
        found = dr.search((model, (ids,)), devices=NODE, profile="dgx-h100", global_batch=samples)
        result = f"{len(found.outcomes)} strategies, fastest {found.ranked[0].strategy}"
    else:
        target = (model, (ids,)) if kind == "run" else _training(model.train(), ids)
        data, tensor, *_ = (int(number) for number in strategy.split(",")[0].split("/"))
        profile = f"dgx-h100:{max(1, data * tensor // NODE)}"
        options = {"precision": "bf16"} if kind == "run" else {}
        simulation = dr.simulate(target, strategy=strategy, profile=profile, **options)
        memory = max(simulation.peak_memory) / 1e9
        result = f"{strategy}: {simulation.makespan:.3g} s a step, {memory:.0f} GB a device"
    seconds = time.perf_counter() - start
    own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"{kind:6} {name:3} {samples:4} x {tokens:6}: {seconds:5.1f} s, {own / 1e6:.2f} GB, workers "
        f"{workers / 1e6:.2f} GB; {result}",
        flush=True,
    )


def _training(model: torch.nn.Module, ids: torch.Tensor) -> dr.Training:
    import torch

    import distir_relax as dr

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    precision = {"precision": "bf16-true", "reduce_dtype": "bf16"}
    return dr.Training(model, loss, optimizer=dr.optim.AdamW(1e-4), example_batch=(ids, ids), **precision)


if __name__ == "__main__":
    if sys.argv[1:]:
        kind, name, samples, tokens, strategy = sys.argv[1:]
        run(kind, name, int(samples), int(tokens), strategy)
    else:
        main()
