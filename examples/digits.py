"""A small vision transformer trained on handwritten digits, on 3 ranks under mpirun: by data, then by tensor.

The 1,797 images are in scikit-learn's wheel. Nothing in the model says how it is split. The same batches are trained by
torch on one process beside it: the curves lie on each other, and what is learnt is the same.

    python examples/digits.py                     the whole show, which leaves digits.png

    distir compile examples/digits.py:build --train --strategy 3/1/1/1 -o digits.dist
    mpirun -n 3 distir train digits.dist --data examples/digits.py:batches --steps 250 --checkpoint ck/
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

import distir_relax as dr
from distir_relax.runtime.launch import find_mpirun, mpirun_command

ROWS, STEPS, STRATEGIES = 99, 250, ("3/1/1/1", "1/3/1/1")
RATE = dr.lr.Cosine(3e-3, STEPS, warmup=20)
Batch = tuple[torch.Tensor, torch.Tensor]

console = Console(highlight=False)


class Block(nn.Module):
    """Attention over the patches, and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        projected = (layer(y) for layer in (self.query, self.key, self.value))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class VisionTransformer(nn.Module):
    """Images of 8 x 8 as 16 patches of 2 x 2."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(16, width) / 8)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def images() -> tuple[Batch, Batch]:
    """Images and digits to learn from, and others to be tested on."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    learnt, tested = order[:1437], order[1437:]
    return (x[learnt], y[learnt]), (x[tested], y[tested])


def batches(start: int = 0) -> Iterator[Batch]:
    """Batches without end, from number `start` on: the same on every rank, which takes its part of each."""
    (x, y), _ = images()
    while True:
        rows = torch.randint(len(x), (ROWS,), generator=torch.Generator().manual_seed(start))
        yield x[rows], y[rows]
        start += 1


def build() -> dr.Training:
    """What is trained, and how."""
    torch.manual_seed(0)
    return dr.Training(
        VisionTransformer(),
        F.cross_entropy,
        optimizer=dr.optim.AdamW(lr=RATE),
        example_batch=next(batches()),
        clip_norm=1.0,
    )


def accuracy(parameters: dict[str, torch.Tensor]) -> float:
    """The share of the test images that a model with these parameters tells right."""
    _, (x, y) = images()
    model = VisionTransformer().eval()
    model.load_state_dict(parameters)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def by_torch() -> tuple[list[float], list[float], float]:
    """One process of torch on the same batches: losses, seconds of each step, and accuracy."""
    torch.manual_seed(0)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters())
    losses, seconds = [], []
    for step, (x, y) in zip(range(STEPS), batches(), strict=False):
        begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = RATE(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds, accuracy(dict(model.state_dict()))


def by_ranks(strategy: str, folder: Path) -> tuple[list[float], list[float], float]:
    """Three ranks under mpirun: the same."""
    bundle, checkpoints, log = (folder / f"{strategy.replace('/', '-')}.{end}" for end in ("dist", "ck", "csv"))
    here = f"{Path(__file__).resolve()}"
    distir = [sys.executable, "-m", "distir_relax"]
    run([*distir, "compile", f"{here}:build", "--train", "--strategy", strategy, "-o", bundle, "--backend", "torch"])
    train = [*distir, "train", bundle, "--data", f"{here}:batches", "--steps", STEPS, "--log", log]
    run(mpirun_command(find_mpirun(), 3, [*train, "--checkpoint", checkpoints, "--every", STEPS], "1"))
    with log.open() as lines:
        rows = list(csv.DictReader(lines))
    state = load_file(checkpoints / (checkpoints / "latest").read_text().strip() / "state.safetensors")
    names = VisionTransformer().state_dict()
    found = accuracy({name: state[name] for name in names})
    return [float(row["loss"]) for row in rows], [float(row["seconds"]) for row in rows], found


def run(command: Sequence[object]) -> None:
    """Run a command; what it prints is shown."""
    words = list(map(str, command))
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The losses of each run by step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    # Each thinner than the one that it lies on.
    styles = ((6.0, "#c8c8c8", "-"), (2.0, "#1f77b4", "-"), (1.2, "#d62728", "--"))
    for (name, losses), (width, color, line) in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(losses) + 1), losses, linewidth=width, color=color, linestyle=line, label=name)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Digits: 3 ranks, and torch on one process")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    torch.set_num_threads(1)
    found = {"torch, one process": by_torch()}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in STRATEGIES:
            console.print(f"\n[bold]{strategy}[/bold] on 3 ranks")
            found[strategy] = by_ranks(strategy, Path(folder))
    expected = found["torch, one process"][0]
    table = Table("", "loss, last step", "furthest from torch", "test accuracy", "samples/s")
    for name, (losses, seconds, right) in found.items():
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        rate = ROWS / statistics.median(seconds)
        table.add_row(name, f"{losses[-1]:.4f}", f"{apart:.1e}", f"{right:.1%}", f"{rate:,.0f}")
    console.print(table)
    draw({name: losses for name, (losses, _, _) in found.items()}, Path("digits.png"))
    console.print("the curves are in digits.png")
    if min(right for _, _, right in found.values()) < 0.95:
        raise SystemExit("expected an accuracy of at least 95 %")


if __name__ == "__main__":
    main()
