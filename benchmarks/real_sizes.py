"""Time and peak memory of import, simulation and search of a Llama of 8B parameters, on long sequences.

``python benchmarks/real_sizes.py``; each case runs in a process of its own. Weights have no data.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

CASES = ((16, 8192, "8/1/1/1,zero=3"), (512, 8192, "8/1/1/1,zero=3"), (1, 131072, "1/8/1/1"), (64, 4096, "search"))
"""Samples, tokens of each, and a strategy, or a search of all strategies of 8 devices."""


def main() -> None:
    """Run all cases, and print a table."""
    for case in CASES:
        subprocess.run([sys.executable, "-W", "ignore", __file__, *map(str, case)], check=True)


def run(samples: int, tokens: int, strategy: str) -> None:
    """Import the model and simulate a strategy, or search; print seconds and the peak memory of all processes."""
    import torch
    import transformers

    import distir_relax as dr

    start = time.perf_counter()
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    target = model, (torch.zeros(samples, tokens, dtype=torch.int64),)
    if strategy == "search":
        found = dr.search(target, devices=8, profile="dgx-h100", global_batch=samples)
        result = f"{len(found.outcomes)} strategies, fastest {found.ranked[0].strategy}"
    else:
        simulation = dr.simulate(target, strategy=strategy, profile="dgx-h100", precision="bf16")
        result = f"{strategy}: {simulation.makespan:.3g} s a step"
    seconds = time.perf_counter() - start
    own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{samples:4} x {tokens:6}: {seconds:5.1f} s, {own / 1e6:.2f} GB, workers {workers / 1e6:.2f} GB; {result}")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]) if sys.argv[1:] else main()
