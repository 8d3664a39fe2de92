"""Every model on every number of ranks with every backend and tail, under mpirun, against unsharded torch.

    python benchmarks/acceptance.py [--backend torch|tvm] [--model minilm|gpt2|rfc] [--ranks 2 3 5]

GPT-2 has its default config (12 layers of 768, vocabulary 50257, tied embeddings) and random weights; MiniLM its
trained weights, compared at the positions that are not padding; the RFC's module comes from TVMScript.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch

import distir_relax as dr

LIMIT = 1e-4


def rfc():
    """The RFC's module: how to compile it, its inputs, and its output."""
    import rfc as example

    inputs = example.inputs()
    x, a, b, c = (torch.from_numpy(inputs[name]) for name in "xABC")
    expected = {"O": (torch.nn.functional.gelu(x @ a) @ b * c).numpy()}
    return example.build, inputs, expected, None


def minilm():
    """MiniLM: how to compile it, its inputs, and its output."""
    import minilm as example

    inputs = example.sentences()
    model = example.AutoModel.from_pretrained(example.FOLDER).eval()
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    where = inputs["attention_mask"].bool().numpy()
    return example.build, {k: v.numpy() for k, v in inputs.items()}, {"last_hidden_state": hidden.numpy()}, where


def gpt2():
    """GPT-2 small: how to compile it, its inputs, and its output."""
    from gpt2 import SHARDINGS, model_and_ids

    model, ids = model_and_ids(12)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits

    def build(ranks: int, tail: str) -> dr.Plan:
        mesh = dr.DeviceMesh((ranks,), ("tp",))
        return dr.compile(model, (ids,), {"use_cache": False}, shardings=SHARDINGS, mesh=mesh, tail=tail, name="gpt2")

    return build, {"input_ids": ids.numpy()}, {"logits": logits.numpy()}, None


def main() -> int:
    """Run what was asked for; 1 when something differs by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["torch", "tvm"], nargs="*", default=["torch", "tvm"])
    parser.add_argument("--model", choices=["rfc", "minilm", "gpt2"], nargs="*", default=["rfc", "minilm", "gpt2"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 5])
    options = parser.parse_args()
    failed = 0
    print(
        f"{'model':8} {'ranks':>5} {'tail':7} {'programs':>8} {'backend':8} {'difference':>10} "
        f"{'ms/step':>8} {'whole s':>8}"
    )
    for name in options.model:
        build, inputs, expected, where = {"rfc": rfc, "minilm": minilm, "gpt2": gpt2}[name]()
        for ranks in options.ranks:
            for tail in ("ragged", "pad"):
                failed += _case(name, build, inputs, expected, where, ranks, tail, options.backend)
    print("all within" if not failed else f"{failed} beyond", LIMIT)
    return 1 if failed else 0


def _case(name, build, inputs, expected, where, ranks, tail, backends) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        np.savez(here / "in.npz", **inputs)
        plan = build(ranks=ranks, tail=tail)
        plan.save(here / "plan.dist", backends=tuple(backends))
        for backend in backends:
            command = [sys.executable, "-m", "distir_relax", "launch", "-n", str(ranks), "plan.dist"]
            command += ["--input", "in.npz", "--output", f"{backend}.npz", "--backend", backend]
            command += ["--repeat", "3", "--report", f"{backend}.json", "--timeout", "500"]
            start = time.perf_counter()
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=900, check=False)
            seconds = time.perf_counter() - start
            if done.returncode:
                print(f"{name:8} {ranks:5} {tail:7} {backend}: failed\n{done.stderr[-2000:]}")
                failed += 1
                continue
            found = np.load(here / f"{backend}.npz")
            pairs = [(found[key], value) for key, value in expected.items()]
            worst = max(float(np.abs(a - b)[... if where is None else where].max()) for a, b in pairs)
            step = json.loads((here / f"{backend}.json").read_text())["step_seconds"] * 1e3
            programs = len(set(plan.modules["ranked"].ranks))
            print(
                f"{name:8} {ranks:5} {tail:7} {programs:8} {backend:8} {worst:10.1e} {step:8.1f} {seconds:8.1f}",
                flush=True,
            )
            failed += not worst < LIMIT
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
