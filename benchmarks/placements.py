"""How long placements by optimisation take for a Llama of 8 billion parameters.

python benchmarks/placements.py [2x4x8 ...]

The model is on the meta device, 32 layers in bfloat16, run on 64 samples of 2,048 tokens; torch.export is not counted.
The machine is 8 nodes of `dgx-h100`. Meshes are 8x8 and 2x4x8 unless given.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch

import distir_relax as dr
from distir_relax.analysis.simulate import simulate_module
from distir_relax.cost.profile import load_profile
from distir_relax.frontends.model import import_model
from distir_relax.frontends.outline import Outline
from distir_relax.ir import Module, uncollected
from distir_relax.lowering import ToDistIR
from distir_relax.placements.cheapest import cheapest, prices_of
from distir_relax.placements.lay_out import lay_out
from distir_relax.placements.solve import graph_of


def llama() -> Module:
    """The model as it is read in, its layers one function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    tokens = torch.zeros(64, 2048, dtype=torch.long, device="meta")
    found = import_model(model, (tokens,), {"use_cache": False}, None, None, False)
    return Outline(found.scopes).run(found.module)


def main(meshes: list[str]) -> None:
    warnings.simplefilter("ignore")
    module, machine = llama(), load_profile("dgx-h100:8")
    for text in meshes:
        shape = tuple(int(n) for n in text.split("x"))
        mesh = dr.DeviceMesh(shape, ("a", "b", "c")[: len(shape)])
        # As passes run.
        with uncollected():
            begin = time.perf_counter()
            graph = graph_of(module, mesh)
            built = time.perf_counter()
            found = cheapest(graph, prices_of(graph, machine), machine.memory)
            end = time.perf_counter()
        simulated = simulate_module(ToDistIR().run(lay_out(graph, found.chosen)), machine)
        print(
            f"{text}: {end - begin:.2f} s (graph {built - begin:.2f}, search {end - built:.2f}); "
            f"a run takes {found.seconds * 1e3:.2f} ms, simulated {simulated.makespan * 1e3:.2f} "
            f"ms, gap {found.gap:.3%}, {found.bytes / 1e9:.2f} GB a device, simulated "
            f"{simulated.peak_memory.max() / 1e9:.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:] or ["8x8", "2x4x8"])
