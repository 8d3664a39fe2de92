"""GPT-2 small, batch 1 x 128 tokens: ours on two ranks beside one-process torch and torch DTensor on gloo.

    python benchmarks/gpt2.py [--rounds 3] [--layers 12] [--json out.json]

All are measured in one run, taking turns, so that a busy machine slows all of them alike; each figure is the median
over all steps of all rounds. Every result is compared with one-process torch.
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
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 10
SHARDINGS = {
    "transformer.h.*.attn.c_attn.weight": "S[1]",
    "transformer.h.*.mlp.c_fc.weight": "S[1]",
    "transformer.wte.weight": "S[0]",
}


def model_and_ids(layers: int):
    """GPT-2 small with random weights, and its input."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval()
    return model, torch.randint(0, 50257, (1, 128))


def eager(layers: int, out: Path) -> None:
    """One process, two threads."""
    import numpy as np
    import torch

    torch.set_num_threads(2)
    model, ids = model_and_ids(layers)
    times = []
    with torch.inference_mode():
        for _ in range(STEPS + 1):
            start = time.perf_counter()
            logits = model(ids, use_cache=False).logits
            times.append(time.perf_counter() - start)
    np.save(out / "eager.npy", logits.numpy())
    (out / "eager.json").write_text(json.dumps(times[1:]))


def dtensor(layers: int, out: Path) -> None:
    """One rank of torch's tensor parallelism over gloo: the layout that our annotations give.

    DTensor cannot cut the fused QKV projection by heads, so its columns are put in the order of the ranks beforehand.
    """
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    model, ids = model_and_ids(layers)
    width = model.config.n_embd

    def linear(conv: torch.nn.Module, order: torch.Tensor | None = None) -> torch.nn.Linear:
        weight, bias = conv.weight.data.t().contiguous(), conv.bias.data
        if order is not None:
            weight, bias = weight[order].contiguous(), bias[order].contiguous()
        made = torch.nn.Linear(weight.shape[1], weight.shape[0])
        made.weight.data, made.bias.data = weight, bias
        return made

    parts = torch.arange(3 * width).view(3, 2, width // 2)
    order = parts.permute(1, 0, 2).reshape(-1)
    plan: dict[str, object] = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1)),
    }
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    for i, block in enumerate(model.transformer.h):
        block.attn.c_attn, block.attn.c_proj = linear(block.attn.c_attn, order), linear(block.attn.c_proj)
        block.mlp.c_fc, block.mlp.c_proj = linear(block.mlp.c_fc), linear(block.mlp.c_proj)
        block.attn.split_size = width // 2
        plan[f"transformer.h.{i}.attn.c_attn"] = ColwiseParallel()
        plan[f"transformer.h.{i}.attn.c_proj"] = RowwiseParallel()
        plan[f"transformer.h.{i}.mlp.c_fc"] = ColwiseParallel()
        plan[f"transformer.h.{i}.mlp.c_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    times = []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            dist.barrier()
            start = time.perf_counter()
            logits = model(ids, use_cache=False).logits
            times.append(time.perf_counter() - start)
    pieces = [None, None]
    dist.all_gather_object(pieces, logits.numpy())
    if dist.get_rank() == 0:
        np.save(out / "dtensor.npy", np.concatenate(pieces, -1))
        (out / "dtensor.json").write_text(json.dumps(times[1:]))
    dist.destroy_process_group()


def compiled(layers: int, out: Path) -> float:
    """Compile ours into `out`; seconds, without building the model."""
    import numpy as np

    import distir_relax as dr

    model, ids = model_and_ids(layers)
    np.savez(out / "in.npz", input_ids=ids.numpy())
    mesh = dr.DeviceMesh((2,), ("tp",))
    dr.compile(*_warm())
    start = time.perf_counter()
    plan = dr.compile(model, (ids,), {"use_cache": False}, shardings=SHARDINGS, mesh=mesh, name="gpt2")
    seconds = time.perf_counter() - start
    plan.save(out / "gpt2.dist", backends=("torch",))
    return seconds


def _warm():
    """A small model: torch.export's own start-up is not our compile time."""
    import torch

    import distir_relax as dr

    class Small(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dr.annotate_sharding(x, dr.DeviceMesh((2,), ("tp",)), "S[0]") + 1

    return Small().eval(), (torch.ones(4, 4),)


def main() -> int:
    """Take turns, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=["eager", "dtensor"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        {"eager": eager, "dtensor": dtensor}[options.part](options.layers, options.out)
        return 0
    import numpy as np

    times: dict[str, list[float]] = {"eager": [], "dtensor": [], "distir": []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        seconds = compiled(options.layers, out)
        print(f"compiled GPT-2, {options.layers} layers, for 2 ranks in {seconds:.2f} s", flush=True)
        part = [__file__, "--layers", str(options.layers), "--out", str(out), "--part"]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29561"]
        single = dict(os.environ, OMP_NUM_THREADS="1")
        for _ in range(options.rounds):
            _run([*part, "eager"], dict(os.environ, OMP_NUM_THREADS="2"))
            times["eager"] += json.loads((out / "eager.json").read_text())
            _run([*torchrun, *part, "dtensor"], single)
            times["dtensor"] += json.loads((out / "dtensor.json").read_text())
            launch = ["-m", "distir_relax", "launch", "-n", "2", str(out / "gpt2.dist"), "--input", str(out / "in.npz")]
            launch += ["--output", str(out / "y.npz"), "--repeat", str(STEPS), "--report", str(out / "report.json")]
            _run(launch, single)
            times["distir"].append(json.loads((out / "report.json").read_text())["step_seconds"])
        expected = np.load(out / "eager.npy")
        wrong = {
            "dtensor": float(np.abs(np.load(out / "dtensor.npy") - expected).max()),
            "distir": float(np.abs(np.load(out / "y.npz")["logits"] - expected).max()),
        }
    found = {name: median(values) * 1e3 for name, values in times.items()}
    ours = found["distir"]
    print(f"torch eager, one process, 2 threads   {found['eager']:7.1f} ms   {found['eager'] / ours:.2f} x ours")
    print(
        f"torch DTensor, 2 ranks, gloo          {found['dtensor']:7.1f} ms   {found['dtensor'] / ours:.2f} x ours"
        f"   (differs by {wrong['dtensor']:.1e})"
    )
    print(f"distir-relax, 2 ranks, MPI            {ours:7.1f} ms            (differs by {wrong['distir']:.1e})")
    if options.json:
        options.json.write_text(json.dumps({"compile_s": seconds, "ms": found, "differs": wrong}, indent=1))
    return 0


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, timeout=600, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
