"""Generation with SmolLM2-135M, trained weights, float32: one request, many together, pipelines, drafts, prefixes.

``PYTHONPATH=build/smollm python benchmarks/serving.py [one] [tensor] [unlike] [pipeline] [drafts] [prefixes]``; by
default all.
Each line is the median of three runs that take turns. The bundles are written to build/serving.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import Bundle, read_bundle
from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import Profile
from distir_relax.runtime.process_session.process_requests import ProcessRequests
from distir_relax.serving import Engine, EngineOptions, start_engine
from tests.smollm import FILE, folder, trained

NEW, RUNS = 32, 3
SYSTEM = "You answer questions about the text below in one sentence. " + "The river rises every spring. " * 60


def bundle(strategy: str, profile: Profile | None = None, suffix: str = "") -> Bundle:
    """Compile the model under a strategy, unless it is in build/serving, and read it."""
    path = Path("build/serving") / f"{strategy.replace('/', '-')}{suffix}.dist"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
        generation = dr.compile_generation(
            trained(), max_length=2048, strategy=strategy, tokenizer=tokenizer, profile=profile
        )
        generation.plan.save(path, backends=("torch",))
    return read_bundle(path)


def prompts(count: int) -> list[list[int]]:
    """Prompts of 32, 33, ... tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 49152, (32 + n,), generator=generator).tolist() for n in range(count)]


def together(engine: Engine, asked: Sequence[Any], new: int = NEW) -> tuple[float, list[Any]]:
    """Return tokens per second of requests that are submitted at once, and the requests."""
    start = time.perf_counter()
    requests = [engine.submit(prompt, new) for prompt in asked]
    engine.run()
    return sum(len(r.tokens) for r in requests) / (time.perf_counter() - start), requests


def medians(work: Sequence[tuple[str, Callable[[], Any]]], unit: str) -> None:
    """Print the median of each measurement; they take turns."""
    found: dict[str, list[float]] = {name: [] for name, _ in work}
    for run in range(RUNS + 1):
        for name, measure in work:
            value = measure()
            # The first is a warm-up.
            found[name] += [value] if run else []
    for name, values in found.items():
        print(
            f"{name:48} {statistics.median(values):8.1f} {unit}   ({min(values):.1f} to {max(values):.1f})", flush=True
        )


def one() -> None:
    """One rank with all threads: a request alone and 16 together, beside transformers."""
    model, asked = trained(), prompts(16)
    ids = torch.tensor([asked[0]])
    with start_engine(bundle("1/1/1/1"), EngineOptions(share_prefixes=False)) as engine:

        def alone() -> float:
            _, (request,) = together(engine, asked[:1])
            return (request.times[-1] - request.times[0]) / (NEW - 1) * 1e3

        def library() -> float:
            with torch.no_grad():
                first = time.perf_counter()
                model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
                middle = time.perf_counter()
                model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
                return (time.perf_counter() - middle - (middle - first)) / (NEW - 1) * 1e3

        medians([("one rank, one request", alone), ("transformers, one request", library)], "ms a token")
        rates = [
            ("one rank, 16 requests together", lambda: together(engine, asked)[0]),
            ("one rank, 4 of them one after the other", lambda: _in_turn(engine, asked[:4])),
        ]
        medians(rates, "tokens/s")


def _in_turn(engine: Engine, asked: Sequence[list[int]]) -> float:
    start = time.perf_counter()
    count = sum(len(engine.submit(prompt, NEW).result()) for prompt in asked)
    return count / (time.perf_counter() - start)


def tensor() -> None:
    """Two tensor-parallel ranks, as processes."""
    asked = prompts(16)
    with start_engine(bundle("1/2/1/1"), EngineOptions(share_prefixes=False)) as engine:
        rates = [
            ("2 ranks, tensor, one request", lambda: together(engine, asked[:1])[0]),
            ("2 ranks, tensor, 16 requests together", lambda: together(engine, asked)[0]),
        ]
        medians(rates, "tokens/s")


def unlike() -> None:
    """Two tensor-parallel ranks, of which one is half as fast: even shards, and shards by speed."""
    even = dr.load_profile("cpu-local")
    slow = replace(even, groups=(Group(((1, 1),), 0.5),))
    asked = prompts(16)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SLOW)
        slowed = {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}
        engines = {}
        for name, profile, suffix in (("even shards", None, ""), ("shards by speed", slow, "-unlike")):
            made = bundle("1/2/1/1", profile, suffix)
            engines[name] = Engine(ProcessRequests(made, variables=slowed), made, EngineOptions(share_prefixes=False))
        for count in (1, 16):
            rates = [
                (f"rank 1 slow, {name}, {count}", lambda e=engine, n=count: together(e, asked[:n])[0])
                for name, engine in engines.items()
            ]
            medians(rates, "tokens/s")
        for engine in engines.values():
            engine.close()


_SLOW = """
import os, time

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    from distir_relax.kernels.packing import PackedLinear

    product = PackedLinear.__call__

    def slow(self, x):
        start = time.perf_counter()
        result = product(self, x)
        end = 2 * time.perf_counter() - start
        while time.perf_counter() < end:
            pass
        return result

    PackedLinear.__call__ = slow
"""
"""Lets products of rank 1 take twice as long."""


def pipeline() -> None:
    """Two stages, as processes: with two steps in flight, and with one."""
    for count in (16, 64):
        asked = prompts(count)
        options = EngineOptions(max_requests=count, share_prefixes=False)
        with start_engine(bundle("1/1/2/1"), options) as engine:
            compare_depths(engine, asked)


def compare_depths(engine: Engine, asked: Sequence[list[int]]) -> None:
    """Throughput with one step in flight and with two, and the share of the time in which stages are idle."""
    idle: dict[int, list[float]] = {}

    def at_depth(depth: int) -> float:
        engine._depth = depth
        before, active = engine._executor.busy(), engine._active
        rate = together(engine, asked)[0]
        seconds = engine._active - active
        idle[depth] = [1 - (b - a) / seconds for a, b in zip(before, engine._executor.busy(), strict=True)]
        return rate

    names = {depth: f"2 stages, {depth} in flight, {len(asked)} requests" for depth in (1, 2)}
    medians([(name, lambda d=depth: at_depth(d)) for depth, name in names.items()], "tokens/s")
    for depth, name in names.items():
        print(f"{name}: bubble {', '.join(f'{share:.0%}' for share in idle[depth])}", flush=True)


def drafts() -> None:
    """Drafts by prompt lookup, on a text that is to be repeated, and on a question."""
    texts = {
        "a text to repeat": "Repeat this text word by word: " + SYSTEM[60:420],
        "a question": "What is the difference between a river and a canal?",
    }
    for name, text in texts.items():
        rates = []
        engines = []
        for count in (0, 4):
            engine = start_engine(bundle("1/1/1/1"), EngineOptions(drafts=count, share_prefixes=False))
            engines.append(engine)
            chat = [{"role": "user", "content": text}]
            rates.append((f"{name}, {count} drafts", lambda e=engine, c=chat: together(e, [c], 96)[0]))
        medians(rates, "tokens/s")
        print(f"{engines[1].accepted_drafts} drafts accepted in {engines[1].steps} steps")
        for engine in engines:
            engine.close()


def prefixes() -> None:
    """Time to the first token of a question after a text that was asked about before."""
    for shares in (False, True):
        with start_engine(bundle("1/1/1/1"), EngineOptions(share_prefixes=shares)) as engine:
            numbers = iter(range(100))

            def first(engine: Engine = engine, numbers: Any = numbers) -> float:
                request = engine.submit(
                    [{"role": "user", "content": f"{SYSTEM} Question {next(numbers)}: what rises?"}], 2
                )
                request.result()
                return (request.times[0] - request.submitted) * 1e3

            medians([(f"first token, prefixes {'shared' if shares else 'not shared'}", first)], "ms")


def main(names: Sequence[str]) -> None:
    """Run the parts named, or all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    parts = {f.__name__: f for f in (one, tensor, unlike, pipeline, drafts, prefixes)}
    for name in names or parts:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
