"""Steps of training by data on 1 to 3 ranks: ours beside DistributedDataParallel of torch, and with sharded weights
beside its fully_shard (FSDP2), both over gloo, on the same cores.

    python benchmarks/training_peers.py [--rounds 2] [--ranks 1 2 3] [--precision float32 bf16] [--json FILE]

A GPT-2-shaped model and a vision transformer (`training_validation`), with AdamW and clipped gradients. Ranks are
processes of one thread; more of them than there are cores take turns on those. In bf16, torch runs under autocast, or
with the mixed precision of fully_shard; all keep weights and their updates in float32. One rank has no weights to
shard. The systems take turns; figures are samples per second, by the median over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench import NAMES, machine
from gpt2 import run_part

SECONDS, WARM_UP, LEAST = 3.0, 3, 5
RATE, CLIP = 1e-4, 1.0
BATCHES = {"gpt2": 12, "vit": 24}
STRATEGIES = {"ours": "{}/1/1/1", "ours, ZeRO-3": "{}/1/1/1,zero=3"}
PEERS = {"ours": "ddp", "ours, ZeRO-3": "fsdp2"}
"""The system of torch that is beside each of ours."""


def made(name: str) -> Any:
    """A model, its loss, and a batch for all ranks."""
    import torch
    import training_validation as models

    torch.manual_seed(0)
    return getattr(models, name)()


def torch_rank(options: argparse.Namespace) -> None:
    """One rank of torch; each has its part of a batch."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in BATCHES:
        model, loss, (inputs, targets) = made(name)
        model, context = PARALLEL[options.system](model, options.precision[0] == "bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        inputs, targets = part_of(inputs, rank, size), part_of(targets, rank, size)
        taken: list[float] = []
        everyone: list[Any] = [None] * size
        until = float("inf")
        while len(taken) < WARM_UP + LEAST or everyone[0] < until:
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            with context():
                found = loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            taken.append(time.perf_counter() - start)
            dist.all_gather_object(everyone, time.perf_counter())
            until = everyone[0] + SECONDS if len(taken) == WARM_UP else until
        if rank == 0:
            write(options, name, taken[WARM_UP:])
    # Threads of gloo may abort a rank that closes its connections, or that ends while another still computes.
    dist.barrier()
    os._exit(0)


def ddp(model: Any, narrow: bool) -> tuple[Any, Callable[[], Any]]:
    """A model with replicated weights, and the context of its forward pass."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model), lambda: torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext()


def fsdp2(model: Any, narrow: bool) -> tuple[Any, Callable[[], Any]]:
    """A model whose blocks have sharded weights, and the context of its forward pass."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if narrow else MixedPrecisionPolicy()
    for module in list(model.modules()):
        if type(module).__name__ in ("GPT2Block", "ViTLayer"):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), nullcontext


def part_of(x: Any, rank: int, size: int) -> Any:
    """The part of a rank of a batch."""
    import torch

    if isinstance(x, dict):
        return {key: part_of(value, rank, size) for key, value in x.items()}
    return x.tensor_split(size)[rank] if isinstance(x, torch.Tensor) else x


def ours(options: argparse.Namespace) -> None:
    """The ranks of a bundle as processes, called from this one."""
    import distir_relax as dr
    from distir_relax.bundle import read_bundle
    from distir_relax.calibration.measure import random_inputs

    for name in BATCHES:
        inputs = random_inputs(read_bundle(bundle(options, name)).manifest)
        with dr.launch(bundle(options, name), threads=1) as session:
            taken: list[float] = []
            until = float("inf")
            while len(taken) < WARM_UP + LEAST or time.perf_counter() < until:
                session.run(inputs, outputs=())
                taken.append(session.seconds)
                until = time.perf_counter() + SECONDS if len(taken) == WARM_UP else until
        write(options, name, taken[WARM_UP:])


def compile_ours(options: argparse.Namespace) -> None:
    """Compile bundles of all models."""
    import distir_relax as dr

    for name in BATCHES:
        model, loss, batch = made(name)
        step = dr.compile_training(
            model, loss, optimizer=dr.optim.AdamW(lr=RATE), example_batch=batch, clip_norm=CLIP,
            strategy=STRATEGIES[options.system].format(options.ranks[0]), precision=options.precision[0], name=name,
        )  # fmt: skip
        step.save(bundle(options, name), backends=("torch",))


def bundle(options: argparse.Namespace, name: str) -> Path:
    """The folder of a bundle."""
    return Path(options.out / f"{options.system}-{options.ranks[0]}-{options.precision[0]}-{name}.dist")


def write(options: argparse.Namespace, name: str, taken: list[float]) -> None:
    """Write the seconds of steps."""
    (options.out / f"{options.system}-{name}.json").write_text(json.dumps(taken))


PARALLEL = {"ddp": ddp, "fsdp2": fsdp2}
PARTS = {"compile": compile_ours, "ours": ours, "torch": torch_rank}


def measure(precision: str, ranks: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the samples per second of each system and model."""
    part = [__file__, "--precision", precision, "--ranks", str(ranks), "--out", str(folder)]
    pairs = {own: peer for own, peer in PEERS.items() if ranks > 1 or own == "ours"}
    for own in pairs:
        run_part([*part, "--system", own, "--part", "compile"], 1)
    systems = [name for pair in pairs.items() for name in pair]
    times: dict[str, dict[str, list[float]]] = {name: {model: [] for model in BATCHES} for name in systems}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29563"]
    for _ in range(rounds):
        for name, by_model in times.items():
            is_own = name in pairs
            run_part(
                [*([] if is_own else torchrun), *part, "--system", name, "--part", "ours" if is_own else "torch"], 1
            )
            for model, taken in by_model.items():
                taken += json.loads((folder / f"{name}-{model}.json").read_text())
    return {
        name: {model: BATCHES[model] / median(taken) for model, taken in by_model.items()}
        for name, by_model in times.items()
    }


def print_table(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    """Print the figures, with ours beside those of its peer."""
    print(f"\n{machine()}, {datetime.date.today():%Y-%m-%d}, samples/s\n")
    print("| model | precision | ranks | system | samples/s | beside | samples/s | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    for precision, by_ranks in found.items():
        for ranks, systems in by_ranks.items():
            for own, peer in PEERS.items():
                for model in BATCHES if own in systems else ():
                    mine, theirs = systems[own][model], systems[peer][model]
                    names = f"{NAMES[own]} | {mine:.1f} | {NAMES[peer]} | {theirs:.1f}"
                    print(f"| {model} | {precision} | {ranks} | {names} | {mine / theirs:.2f} |")


def main() -> int:
    """Take turns, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--system", choices=[*PEERS, *PEERS.values()], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.part:
        PARTS[options.part](options)
        return 0
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precision:
            for ranks in options.ranks:
                of_ranks = measure(precision, ranks, options.rounds, Path(folder))
                found.setdefault(precision, {})[str(ranks)] = of_ranks
                rows = (f"{name} {row[m]:.1f} ({m})" for name, row in of_ranks.items() for m in row)
                print(f"{precision}, {ranks} of {len(os.sched_getaffinity(0))} cores:", ", ".join(rows), flush=True)
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
