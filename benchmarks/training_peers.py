"""Steps of training on two ranks by data: ours beside torch's DistributedDataParallel over gloo, on the same two cores.

    python benchmarks/training_peers.py [--rounds 3] [--precision float32 bf16]

A GPT-2-shaped model and a vision transformer (`training_validation`), with AdamW and clipped gradients. In bf16, torch
runs under autocast; both keep weights and their updates in float32. Each contender runs in processes of its own, in
turns; figures are samples per second, by the median over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpt2 import run_part

SECONDS, WARM_UP, LEAST = 4.0, 3, 5
RATE, CLIP = 1e-4, 1.0
MODELS = ("gpt2", "vit")


def made(name: str) -> Any:
    """A model, its loss, and a batch for both ranks."""
    import torch
    import training_validation as models

    torch.manual_seed(0)
    return getattr(models, name)()


def ddp(options: argparse.Namespace) -> None:
    """One rank of torch's data parallelism; each has half of a batch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    for name in MODELS:
        model, loss, (inputs, targets) = made(name)
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        inputs, targets = half(inputs, dist.get_rank()), half(targets, dist.get_rank())
        narrow = torch.autocast("cpu", torch.bfloat16) if options.precision[0] == "bf16" else nullcontext()
        taken: list[float] = []
        everyone: list[Any] = [None, None]
        until = float("inf")
        while len(taken) < WARM_UP + LEAST or everyone[0] < until:
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            with narrow:
                found = loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            taken.append(time.perf_counter() - start)
            dist.all_gather_object(everyone, time.perf_counter())
            until = everyone[0] + SECONDS if len(taken) == WARM_UP else until
        if dist.get_rank() == 0:
            write(options, name, taken[WARM_UP:])
    dist.destroy_process_group()


def half(x: Any, rank: int) -> Any:
    """The part of a rank of a batch."""
    import torch

    if isinstance(x, dict):
        return {key: half(value, rank) for key, value in x.items()}
    return x[rank * (len(x) // 2) : (rank + 1) * (len(x) // 2)] if isinstance(x, torch.Tensor) else x


def ours(options: argparse.Namespace) -> None:
    """The ranks of a bundle as processes, called from this one."""
    import distir_relax as dr
    from distir_relax.bundle import read_bundle
    from distir_relax.calibration.measure import random_inputs

    for name in MODELS:
        path = options.out / f"{options.precision[0]}-{name}.dist"
        inputs = random_inputs(read_bundle(path).manifest)
        with dr.launch(path, threads=1) as session:
            taken: list[float] = []
            until = float("inf")
            while len(taken) < WARM_UP + LEAST or time.perf_counter() < until:
                session.run(inputs, outputs=())
                taken.append(session.seconds)
                until = time.perf_counter() + SECONDS if len(taken) == WARM_UP else until
        write(options, name, taken[WARM_UP:])


def write(options: argparse.Namespace, name: str, taken: list[float]) -> None:
    """Write the seconds of steps."""
    (options.out / f"{options.precision[0]}-{options.part}-{name}.json").write_text(json.dumps(taken))


def compile_ours(options: argparse.Namespace) -> None:
    """Compile bundles of all models."""
    import distir_relax as dr

    for name in MODELS:
        model, loss, batch = made(name)
        step = dr.compile_training(
            model, loss, optimizer=dr.AdamW(lr=RATE), example_batch=batch, clip_norm=CLIP, strategy="2/1/1/1",
            precision=options.precision[0], name=name,
        )  # fmt: skip
        step.save(options.out / f"{options.precision[0]}-{name}.dist", backends=("torch",))


PARTS = {"compile": compile_ours, "ours": ours, "ddp": ddp}


def main() -> int:
    """Take turns, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.part:
        PARTS[options.part](options)
        return 0
    found: dict[str, dict[str, dict[str, float]]] = {}
    batches = {"gpt2": 12, "vit": 24}
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precision:
            part = [__file__, "--precision", precision, "--out", folder, "--part"]
            run_part([*part, "compile"], 2)
            times: dict[str, dict[str, list[float]]] = {n: {m: [] for m in MODELS} for n in ("ours", "ddp")}
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29563"]
            for _ in range(options.rounds):
                run_part([*part, "ours"], 1)
                run_part([*torchrun, *part, "ddp"], 1)
                for name, by_model in times.items():
                    for model, taken in by_model.items():
                        taken += json.loads((Path(folder) / f"{precision}-{name}-{model}.json").read_text())
            found[precision] = {
                name: {model: batches[model] / median(taken) for model, taken in by_model.items()}
                for name, by_model in times.items()
            }
            for model in MODELS:
                mine, theirs = (found[precision][name][model] for name in ("ours", "ddp"))
                print(f"{precision:8} {model:5} ours {mine:7.1f} samples/s, DDP {theirs:7.1f}: {mine / theirs:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
