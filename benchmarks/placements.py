"""How long placements by optimisation take for a Llama of 8 billion parameters.

    python benchmarks/placements.py [2x4x8 ...] [--memory BYTES ...] [--train]

The model is on the meta device, 32 layers in bfloat16, run on 64 samples of 2,048 tokens, or with `--train` a step of
AdamW on them; torch.export is not counted. The machine is 8 nodes of `dgx-h100`. Meshes are 8x8 and 2x4x8 unless given.
With `--memory` devices have less than their 80 GB: each of the amounts given, which may be too little.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.apply_solution import apply_solution
from distir_relax.autosharding.autoshard import build_graph
from distir_relax.autosharding.optimize import cost_table_of, optimize
from distir_relax.autosharding.solver import InsufficientMemory
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.pass_manager import run_passes
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.frontends.import_model import import_model
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Module, gc_disabled
from distir_relax.lowering import ToDistIR
from distir_relax.simulation.simulator import simulate_module

MACHINE = "dgx-h100:8"


def model(**options: Any) -> torch.nn.Module:
    """A Llama without data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, **options,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def inference() -> Module:
    """The model as it is read in, its layers one function."""
    tokens = torch.zeros(64, 2048, dtype=torch.long, device="meta")
    narrow = model().eval().to(torch.bfloat16)
    found = import_model(narrow, (tokens,), {"use_cache": False}, None, None, False)
    return Outline(found.scopes).run(found.module)


def training() -> Module:
    """A step of training as it is laid out: forward, backward, and AdamW in float32."""

    def next_words(out: Any, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())

    tokens = torch.zeros(64, 2048, dtype=torch.long)
    step = dr.Training(
        model(use_cache=False), next_words, dr.optim.AdamW(), ({"input_ids": tokens}, tokens), precision="bf16-true"
    )
    source = step.read(CompileOptions(mesh=(8, 8), shardings="auto", profile=MACHINE))
    before = itertools.takewhile(lambda step: not isinstance(step, PlaceBySearch), source.passes())
    return run_passes(source.imported.module, tuple(before))


def measure(module: Module, machine: Profile, text: str, memory: float) -> None:
    """Lay a program out on a mesh, and say how long that took and what was found."""
    shape = tuple(int(n) for n in text.split("x"))
    mesh = dr.DeviceMesh(shape, ("a", "b", "c")[: len(shape)])
    # As passes run.
    with gc_disabled():
        begin = time.perf_counter()
        graph = build_graph(module, mesh)
        built = time.perf_counter()
        try:
            found = optimize(graph, cost_table_of(graph, machine), memory)
        except InsufficientMemory as error:
            taken = time.perf_counter() - begin
            print(f"{text}, {memory / 1e9:g} GB: {taken:.2f} s: too little, {error.minimum / 1e9:.2f} GB would do")
            return
        end = time.perf_counter()
    simulated = simulate_module(ToDistIR().run(apply_solution(graph, found.chosen)), machine)
    print(
        f"{text}, {memory / 1e9:g} GB: {end - begin:.2f} s (graph {built - begin:.2f}, search {end - built:.2f}); "
        f"a run takes {found.seconds * 1e3:.2f} ms, simulated {simulated.makespan * 1e3:.2f} "
        f"ms, gap {found.gap:.3%}, {found.bytes / 1e9:.2f} GB a device, simulated "
        f"{simulated.peak_memory.max() / 1e9:.2f} GB",
        flush=True,
    )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("meshes", nargs="*", default=["8x8", "2x4x8"])
    parser.add_argument("--memory", type=float, action="append", help="bytes of a device")
    parser.add_argument("--train", action="store_true", help="a step of training")
    given = parser.parse_args()
    module, machine = training() if given.train else inference(), load_profile(MACHINE)
    for text, memory in itertools.product(given.meshes, given.memory or [machine.memory]):
        measure(module, machine, text, memory)


if __name__ == "__main__":
    main()
