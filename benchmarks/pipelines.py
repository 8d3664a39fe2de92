"""Steps of a pipeline on two ranks against what its bubble allows, and against torch's own pipelining.

python benchmarks/pipelines.py [ROUNDS]

A GPT-2-shaped model, 8 microbatches, one thread a rank. What a schedule allows is the length of its time line, each
task taking as long as it does when a rank works alone: with one microbatch, no two ranks work at once. torch's pipeline
has the same blocks in each stage, and runs on gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MICROBATCHES, ROWS, LENGTH, WIDTH, BLOCKS, WORDS = 8, 16, 128, 256, 8, 1000
STEPS, WARM_UP = 8, 3
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
)
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


class Block(nn.Module):
    """A block of GPT-2: attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


def parts() -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """The embedding, the blocks, and the head."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    return nn.Embedding(WORDS, WIDTH), [Block() for _ in range(BLOCKS)], head


def whole() -> nn.Module:
    embedding, blocks, head = parts()
    return nn.Sequential(embedding, *blocks, head)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    return ids, ids.roll(-1, 1)


def run_ours(path: Path) -> None:
    """One rank: the seconds of steps, and of tasks, to a file beside the bundle."""
    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.machine import limit_threads, retain_freed_memory
    from distir_relax.runtime.session import Session
    from distir_relax.runtime.training.batches import numbers, training_of

    with joined_world() as world:
        limit_threads(2)
        retain_freed_memory()
        bundle = read_bundle(path)
        session, name = Session(bundle, world=world), training_of(bundle.manifest).loss
        x, targets = batch()
        if path.stem == "alone":
            x, targets = x[: ROWS // MICROBATCHES], targets[: ROWS // MICROBATCHES]
        seconds, tasks = [], []
        for step in range(WARM_UP + STEPS):
            session({**whole_inputs(bundle, x, targets), **numbers(bundle.manifest, step)}, outputs=(name,))
            seconds.append(session.seconds)
            tasks.append(session.communicator.progress.tasks)
        everyone = world.exchange([seconds[WARM_UP:], tasks[WARM_UP:]])
        if world.rank == 0:
            path.with_suffix(".json").write_text(json.dumps(everyone))
        world.close()


def whole_inputs(bundle: Any, x: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """The batch by the names of the bundle's inputs, which come in this order."""
    divided = [division.name for division in bundle.manifest.divided_inputs]
    names = divided or [t.name for t in bundle.manifest.inputs if t.dtype == "int64"]
    return dict(zip(names, (x, targets), strict=True))


def run_torch(schedule: str, path: Path) -> None:
    """One rank of torch's pipelining on gloo."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    embedding, blocks, head = parts()
    half = BLOCKS // 2
    module = nn.Sequential(embedding, *blocks[:half]) if rank == 0 else nn.Sequential(*blocks[half:], head)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    pipeline = kind(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, targets = batch()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        pipeline.step(x) if rank == 0 else pipeline.step(target=targets, losses=[])
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        path.write_text(json.dumps(seconds[WARM_UP:]))
    dist.destroy_process_group()


def allowed(schedule: str, tasks: list[list[Any]]) -> float:
    """The seconds of a step along the schedule's time line, its tasks as long as they are for one process."""
    from distir_relax.schedules import Times, order_of, timeline

    seconds: dict[str, dict[int, list[float]]] = {"F": {}, "I": {}, "W": {}}
    for step in tasks:
        for name, begin, end in step:
            kind = next(k for k in "FIW" if k in name)
            seconds[kind].setdefault(int(name.partition(kind)[0]), []).append(end - begin)
    forward, inputs, weights = ([statistics.median(seconds[k][s]) for s in (0, 1)] for k in "FIW")
    return float(timeline(order_of(schedule, 2, MICROBATCHES), Times(forward, inputs, weights)).makespan)


def main(rounds: int) -> None:
    warnings.simplefilter("ignore")
    import distir_relax as dr
    from distir_relax.runtime.launch import find_mpirun, mpirun_command

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for name in ("alone", *SCHEDULES):
            strategy, (x, targets) = f"1/1/2/{MICROBATCHES},schedule={name}", batch()
            if name == "alone":
                strategy, x, targets = "1/1/2/1", x[: ROWS // MICROBATCHES], targets[: ROWS // MICROBATCHES]
            step = dr.compile_training(
                whole(), loss, optimizer=dr.optim.SGD(lr=0.01), example_batch=(x, targets), strategy=strategy,
                stages=[f"{1 + BLOCKS // 2}"],
            )  # fmt: skip
            step.save(here / f"{name}.dist", ("torch",))
        found: dict[str, list[float]] = {}
        alone: list[Any] = []
        for _ in range(rounds):
            for name in ("alone", *SCHEDULES):
                command = [sys.executable, __file__, "--ours", str(here / f"{name}.dist")]
                subprocess.run(mpirun_command(find_mpirun(), 2, command, "1"), env=environment, check=True)
                everyone = json.loads((here / f"{name}.json").read_text())
                found.setdefault(f"ours {name}", []).extend(map(max, zip(*(rank[0] for rank in everyone), strict=True)))
                alone += [tasks for rank in everyone for tasks in rank[1]] if name == "alone" else []
            for name in ("1f1b", "gpipe"):
                command = [*TORCHRUN, __file__, "--torch", name, str(here / "t.json")]
                subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
                found.setdefault(f"torch {name}", []).extend(json.loads((here / "t.json").read_text()))
        for name, seconds in found.items():
            line = f"{name:12} {1e3 * statistics.median(seconds):7.1f} ms"
            if name.startswith("ours") and name != "ours alone":
                bound = allowed(name.split()[1], alone)
                line += f"   its tasks allow {1e3 * bound:6.1f} ms: {bound / statistics.median(seconds):.2f}"
            print(line)


if __name__ == "__main__":
    if "--ours" in sys.argv:
        run_ours(Path(sys.argv[2]))
    elif "--torch" in sys.argv:
        run_torch(sys.argv[2], Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
