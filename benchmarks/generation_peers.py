"""Text generation with SmolLM2-135M beside vLLM, OpenVINO GenAI, CTranslate2, llama.cpp and transformers.

``PYTHONPATH=build/smollm python benchmarks/generation_peers.py [--vllm VENV] [--others VENV] [--precision bf16]``

Peers have environments of their own, since their requirements exclude each other's: ``make peers`` makes them in
build/peers, `vllm` and `others`.

Each contender runs in a process of its own, on the same cores, in turns; medians over all rounds of

    first    milliseconds from a prompt of 128 tokens to its first token
    token    milliseconds between the next 32 tokens of one request
    together tokens per second of 16 requests of 32 to 47 tokens, 32 new ones each

With ``--precision int8`` or ``int4`` those run that store weights so: CTranslate2 in 8 bits, OpenVINO and llama.cpp
(Q8_0, Q4_0) in both.
A contender that does not run is listed with its error. The model's folder and its conversions are in build/serving.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NEW, REQUESTS, PROMPT, RUNS = 32, 16, 128, 3
BUILD = Path("build/serving").absolute()
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
}  # fmt: skip
Generate = Callable[[Sequence[Sequence[int]], int], None]
"""Generates so many greedy tokens for each of several prompts at once."""


def prompts() -> list[list[int]]:
    """One prompt of 128 tokens, and 16 of 32 to 47."""
    import random

    rng = random.Random(0)
    lengths = [PROMPT, *(32 + n for n in range(REQUESTS))]
    return [[rng.randrange(3, 49152) for _ in range(length)] for length in lengths]


def measure(generate: Generate) -> dict[str, float]:
    """Time a contender."""
    long, *several = prompts()

    def seconds(asked: Sequence[Sequence[int]], new: int) -> float:
        times = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            generate(asked, new)
            times.append(time.perf_counter() - start)
        # The first is a warm-up.
        return statistics.median(times[1:])

    first = seconds([long], 1)
    token = (seconds([long], 1 + NEW) - first) / NEW
    return {"first": first * 1e3, "token": token * 1e3, "together": REQUESTS * NEW / seconds(several, NEW)}


def ours(precision: str, strategy: str = "1/1/1/1") -> Generate:
    """The engine of this package, under a strategy."""
    from distir_relax.bundle import read_bundle
    from distir_relax.serving import EngineOptions, start_engine

    engine = start_engine(read_bundle(bundle(precision, strategy)), EngineOptions(share_prefixes=False))

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        requests = [engine.submit(list(prompt), new) for prompt in asked]
        engine.run()
        assert all(len(request.tokens) == new for request in requests)

    return generate


def transformers(precision: str) -> Generate:
    """The library that the model comes from, with its cache; requests are padded to one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        BUILD / "hf", dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        most = max(map(len, asked))
        ids = torch.tensor([[0] * (most - len(prompt)) + list(prompt) for prompt in asked])
        mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in asked])
        with torch.no_grad():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )

    return generate


def vllm(precision: str) -> Generate:
    """The CPU engine of vLLM."""
    from vllm import LLM, SamplingParams

    dtype = "bfloat16" if precision == "bf16" else "float32"
    engine = LLM(str(BUILD / "hf"), dtype=dtype, max_model_len=1024, max_num_seqs=REQUESTS, enable_prefix_caching=False)

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": list(prompt)} for prompt in asked], sampling, use_tqdm=False)

    return generate


def ctranslate2(precision: str) -> Generate:
    """CTranslate2, whose batches are static."""
    import ctranslate2 as ct2

    kind = {"bf16": "bfloat16"}.get(precision, precision)
    generator = ct2.Generator(str(BUILD / "ct2"), compute_type=kind, intra_threads=len(os.sched_getaffinity(0)))
    names = json.loads((BUILD / "ct2" / "vocabulary.json").read_text())

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        generator.generate_batch(
            [[names[token] for token in prompt] for prompt in asked], max_length=new, min_length=new, sampling_topk=1,
            include_prompt_in_result=False, end_token=[],
        )  # fmt: skip

    return generate


def openvino(precision: str) -> Generate:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    kind = "bf16" if precision == "bf16" else "f32"
    # The models are random prompts of token ids: the tokenizer is not used.
    folder = BUILD / (f"ov-{precision}" if precision in QUANTIZED else "ov")
    pipe = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": kind})

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        tensors = [ov.Tensor(np.array([prompt], np.int64)) for prompt in asked]
        pipe.generate(tensors, [config] * len(tensors))

    return generate


LLAMA_TYPES = {"float32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""The types of llama.cpp's matrices."""


def llama(precision: str) -> Generate:
    """The server of llama.cpp, in this process (xllamacpp)."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(BUILD / f"llama-{LLAMA_TYPES[precision]}.gguf")
    options.n_ctx, options.n_parallel, options.verbosity = 4096, REQUESTS, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(options)

    def generate(asked: Sequence[Sequence[int]], new: int) -> None:
        body = {"prompt": [list(p) for p in asked], "max_tokens": new, "temperature": 0, "ignore_eos": True}
        found = server.handle_completions({**body, "cache_prompt": False})
        assert len(found["choices"]) == len(asked)

    return generate


QUANTIZED = {
    "int8": ("ours, 1 rank", "ours, 2 ranks", "ctranslate2", "openvino", "llama.cpp"),
    "int4": ("ours, 1 rank", "ours, 2 ranks", "openvino", "llama.cpp"),
}
"""The contenders that have weights of 8 and 4 bits."""

CONTENDERS: dict[str, Callable[[str], Generate]] = {
    "ours, 1 rank": ours,
    "ours, 2 ranks": lambda precision: ours(precision, "1/2/1/1"),
    "transformers": transformers,
    "vllm": vllm,
    "ctranslate2": ctranslate2,
    "openvino": openvino,
    "llama.cpp": llama,
}


def bundle(precision: str, strategy: str) -> Path:
    """The model compiled under a strategy; it is compiled unless it is in build/serving."""
    import distir_relax as dr

    path = BUILD / f"{precision}-{strategy.replace('/', '-')}.dist"
    if not path.exists():
        generation = dr.compile_generation(BUILD / "hf", max_length=2048, strategy=strategy, precision=precision)
        generation.plan.save(path, backends=("torch",))
    return path


def prepare(others: str | None) -> None:
    """Write the model's folder, and its conversions."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    if not (BUILD / "hf").exists():
        from transformers import AutoTokenizer

        from tests.smollm import FILE, folder, trained

        trained().save_pretrained(BUILD / "hf")
        AutoTokenizer.from_pretrained(folder(), gguf_file=FILE).save_pretrained(BUILD / "hf")
        # For releases of transformers that know neither the class nor the place of the base of rotary positions.
        for name, changes in {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
            "config.json": {"rope_theta": 100000.0},
        }.items():
            file = BUILD / "hf" / name
            file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=1))
    if others is not None:
        from tests.smollm import FILE, folder

        for kind in LLAMA_TYPES.values():
            target = BUILD / f"llama-{kind}.gguf"
            if not target.exists():
                made = target.with_suffix(".part")
                tool = str(Path(__file__).with_name("gguf_types.py"))
                subprocess.run([sys.executable, tool, str(Path(folder()) / FILE), str(made), kind], check=True)
                made.rename(target)
        convert = {
            "ct2": ["ct2-transformers-converter", "--model", str(BUILD / "hf"), "--output_dir", str(BUILD / "ct2")],
            **{
                name: [
                    "optimum-cli", "export", "openvino", "--model", str(BUILD / "hf"), "--task",
                    "text-generation-with-past", "--weight-format", kind,
                    *(["--group-size", "32"] if kind == "int4" else []), str(BUILD / name),
                ]
                for name, kind in (("ov", "fp32"), ("ov-int8", "int8"), ("ov-int4", "int4"))
            },
        }  # fmt: skip
        for name, (tool, *arguments) in convert.items():
            if not (BUILD / name).exists():
                subprocess.run([f"{others}/bin/{tool}", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="The virtual environment of vLLM.")
    parser.add_argument("--others", help="The virtual environment of the other peers.")
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        name, precision = given.run
        print(json.dumps(measure(CONTENDERS[name](precision))))
        # Engines that hold threads need not end them.
        sys.stdout.flush()
        os._exit(0)
    prepare(given.others)
    pythons = {"vllm": given.vllm, "ctranslate2": given.others, "openvino": given.others, "llama.cpp": given.others}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for precision in given.precision:
        found: dict[str, list[dict[str, float]]] = {}
        errors: dict[str, str] = {}
        for _ in range(given.rounds):
            for name in QUANTIZED.get(precision, CONTENDERS):
                if name in pythons and pythons[name] is None:
                    continue
                python = f"{pythons[name]}/bin/python" if name in pythons else sys.executable
                ran = subprocess.run(
                    [python, __file__, "--run", name, precision], env={**os.environ, **VLLM}, capture_output=True,
                    text=True, timeout=900,
                )  # fmt: skip
                try:
                    times = json.loads(ran.stdout.splitlines()[-1])
                    found.setdefault(name, []).append(times)
                except (IndexError, ValueError):
                    errors[name] = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"\n{precision:16}{'first token':>14}{'next token':>14}{'16 together':>18}")
        results[precision] = {
            name: {key: statistics.median(one[key] for one in rounds) for key in ("first", "token", "together")}
            for name, rounds in found.items()
        }
        for name, one in results[precision].items():
            first, token, together = one.values()
            print(f"{name:16}{first:11.1f} ms{token:11.1f} ms{together:11.1f} tokens/s", flush=True)
        for name, error in errors.items():
            print(f"{name:16}{error}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
