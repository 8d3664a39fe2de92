"""What symbolic sizes cost: compilation, the first call of a new shape, and later calls, against a static plan.

    python benchmarks/shapes.py [--model gpt2|smollm2] [--backends torch tvm] [--threads 2] [--times 30]

GPT-2 small, or a Llama of the shape of SmolLM2-135M, with random weights, on one rank. The plan with symbolic batch and
sequence and one compiled for each shape take turns. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import distir_relax as dr

SHAPES = ((1, 1), (1, 128), (8, 128))
CALL = {"use_cache": False}


def main() -> None:
    """Print the ratios for one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt2", "smollm2"), default="gpt2")
    parser.add_argument("--backends", nargs="+", default=["torch", "tvm"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=30)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = make(options.model)
    compile_times(model)
    symbolic = compiled(model, (2, 128), True)
    for backend in options.backends:
        for shape in SHAPES:
            static = compiled(model, shape, False)
            compare(symbolic, static, shape, backend, options.times)
        new_shapes(symbolic, model, backend)


def make(name: str) -> Any:
    """Return a model with random weights."""
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config()).eval()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(shape: tuple[int, int]) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(0, 40_000, shape)


def compiled(model: Any, shape: tuple[int, int], symbolic: bool) -> dr.Plan:
    """Compile for one rank, for one shape or for all."""
    dynamic = {"input_ids": {0: "batch", 1: dr.Dim("sequence", max=1024)}} if symbolic else None
    return dr.compile(model, (tokens(shape),), CALL, mesh=1, dynamic_shapes=dynamic)


def compile_times(model: Any, times: int = 5) -> None:
    """Print the time of compilation, symbolic and static, with that of torch.export, and without."""
    export, spent = torch.export.export, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return export(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    torch.export.export = timed  # type: ignore[assignment]
    rows: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    try:
        for number in range(times + 1):
            for symbolic in (True, False):
                spent[0] = 0.0
                seconds = measured(lambda symbolic=symbolic: compiled(model, (2, 128), symbolic))  # type: ignore[misc]
                if number:
                    rows[symbolic].append((seconds, spent[0]))
    finally:
        torch.export.export = export
    for what, pick in (
        ("compile", lambda row: row[0]), ("torch.export", lambda row: row[1]), ("the rest", lambda row: row[0] - row[1])
    ):  # fmt: skip
        ours, theirs = (statistics.median(map(pick, rows[symbolic])) for symbolic in (True, False))
        print(f"{what}: symbolic {ours:.2f} s, static {theirs:.2f} s, {ours / theirs:.2f} times")


def compare(symbolic: dr.Plan, static: dr.Plan, shape: tuple[int, int], backend: str, times: int) -> None:
    """Print the time of a call of one shape, of both plans in turn."""
    x = tokens(shape)
    plans = {"symbolic": symbolic, "static": static}
    rows: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(times + 2):
        for name, plan in plans.items():
            seconds = measured(lambda plan=plan: plan(x, backend=backend, **CALL))  # type: ignore[misc]
            if number >= 2:
                rows[name].append(seconds)
    ours, theirs = (statistics.median(rows[name]) * 1e3 for name in plans)
    size = "x".join(map(str, shape))
    print(f"{backend} {size}: symbolic {ours:.2f} ms, static {theirs:.2f} ms, {ours / theirs:.3f} times")


def new_shapes(plan: dr.Plan, model: Any, backend: str) -> None:
    """Print how much longer calls of 30 lengths take the first time than the second, of the plan and of eager torch.

    Every call follows one of another length: the processor's caches are equally cold both times.
    """
    run: dict[str, Callable[[torch.Tensor], Any]] = {
        backend: lambda x: plan(x, backend=backend, **CALL),
        "eager": lambda x: model(x, **CALL),
    }
    inputs = [tokens((1, length)) for length in range(3, 63, 2)]
    texts = []
    with torch.no_grad():
        for name, call in run.items():
            first, again, third = ([measured(lambda x=x, call=call: call(x)) for x in inputs] for _ in range(3))  # type: ignore[misc]
            longer = statistics.median(a - min(b, c) for a, b, c in zip(first, again, third, strict=True))
            texts.append(f"{name} {longer * 1e3:.2f} ms")
    print(f"first call of a new length, longer by: {', '.join(texts)}")


def measured(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
