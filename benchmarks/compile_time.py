"""How long a model takes to compile, pass by pass, on meshes of two to a thousand devices.

    python benchmarks/compile_time.py [--layers 4 32]

A Llama with random weights, heads and inner dims split along one axis, and the batch along the other where there are
two. Once with its layers as a function, once with them written out. Times are medians. What `torch.export` takes is
shown by itself: it does not depend on the mesh.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distir_relax.compiler.pass_manager import Stages, run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch import importer as frontend
from distir_relax.layout import DeviceMesh

MESHES = ((2,), (32, 32), (128, 8))
SHARDINGS = {
    "*.self_attn.[qkv]_proj.weight": "S[0]",
    "*.mlp.gate_proj.weight": "S[0]",
    "*.mlp.up_proj.weight": "S[0]",
    "lm_head.weight": "S[0]",
}

Times = dict[str, float]
"""Seconds by name, in order."""


def main() -> None:
    """Print, for each number of layers, a row for each mesh."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--times", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for layers in options.layers:
        imported, export, reading = read(layers)
        print(f"\n{layers} layers: torch.export {export * 1e3:.0f} ms, reading its graph {reading * 1e3:.0f} ms")
        for outline, rows in medians(imported, options.times).items():
            print("layers as a function" if outline else "layers written out")
            table(rows, reading)


def table(rows: Mapping[tuple[int, ...], Times], reading: float) -> None:
    """A row for each mesh: its passes, and all of them beside those of the first mesh."""
    first = sum(rows[MESHES[0]].values())
    print(f"| mesh | {' | '.join(rows[MESHES[0]])} | all, ms | to {MESHES[0]} | with reading |")
    print("|---" * (len(rows[MESHES[0]]) + 4) + "|")
    for shape, row in rows.items():
        total = sum(row.values())
        print(
            f"| {'x'.join(map(str, shape))} | {' | '.join(f'{t * 1e3:.1f}' for t in row.values())} | "
            f"{total * 1e3:.1f} | {total / first:.2f} | {(total + reading) / (first + reading):.2f} |"
        )


def llama(layers: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small Llama of 32 heads and its example call."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=1027,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config).eval(), (torch.randint(0, 1000, (64, 16)),), {"use_cache": False}


def read(layers: int) -> tuple[Imported, float, float]:
    """The model imported, the seconds of `torch.export`, and those of reading what it gave."""
    model, args, kwargs = llama(layers)
    exporting: list[float] = []
    export = frontend._export

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        program = export(*arguments)
        exporting.append(time.perf_counter() - started)
        return program

    frontend._export = timed
    try:
        started = time.perf_counter()
        imported = frontend.import_torch(model, args, kwargs)
        whole = time.perf_counter() - started
    finally:
        frontend._export = export
    return imported, exporting[0], whole - exporting[0]


def passes(imported: Imported, shape: tuple[int, ...], outline: bool) -> Times:
    """The seconds of each pass on a mesh."""
    axes = ("dp", "tp")[-len(shape) :]
    mesh = DeviceMesh(shape, axes)
    shardings = {pattern: ", ".join(["R"] * (len(shape) - 1) + [text]) for pattern, text in SHARDINGS.items()}
    if len(shape) > 1:
        shardings["input_ids"] = "S[0], R"
    stages = Stages()
    scopes = imported.scopes if outline else None
    run_passes(
        imported.module,
        compile_passes(mesh, "ragged", shardings, imported.names, scopes=scopes, outline=scopes is not None),
        (stages,),
    )
    return stages.seconds


def medians(imported: Imported, times: int) -> dict[bool, dict[tuple[int, ...], Times]]:
    """The median seconds of each pass with functions and without, by mesh.

    Nothing is remembered from one time to the next; all are measured in turn, so that other load is shared.
    """
    runs: dict[tuple[bool, tuple[int, ...]], list[Times]] = {(o, s): [] for o in (True, False) for s in MESHES}
    with _few_collections() as caches:
        for _ in range(times):
            for (outline, shape), found in runs.items():
                for cache in caches:
                    cache.cache_clear()
                found.append(passes(imported, shape, outline))
    rows = {key: {name: statistics.median(r[name] for r in found) for name in found[0]} for key, found in runs.items()}
    return {outline: {shape: rows[outline, shape] for shape in MESHES} for outline in (True, False)}


@contextmanager
def _few_collections() -> Iterator[list[Any]]:
    """What is there already (torch, transformers) is not looked through again and again by the garbage collector.

    Gives the compiler's caches, those without end left out: they hold what is registered once.
    """
    gc.collect()
    found = [item for item in gc.get_objects() if type(item).__name__ == "_lru_cache_wrapper"]
    ours = [item for item in found if (item.__module__ or "").startswith("distir_relax")]
    gc.freeze()
    yield [item for item in ours if item.cache_parameters()["maxsize"] is not None]
    gc.unfreeze()


if __name__ == "__main__":
    main()
