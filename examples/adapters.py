"""Low-rank adapters (LoRA) on a frozen vision transformer, trained on 2 ranks by tensor parallelism.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. A linear layer of the base computes
``x W' + b + x A' B' s``, with matrices A and B of rank `RANK`, of which B is initially zero. Only A and B are trained:
the optimizer's state and the checkpoints contain nothing of the base. The base is trained on handwritten digits, the
adapters on rotated ones.

    python examples/adapters.py        train on 2 ranks and by torch on one process, merge, and compare

    distir compile examples/adapters.py:build --train --strategy 1/2/1/1 -o adapters.dist
    distir train -n 2 adapters.dist --data examples/adapters.py:batches --steps 120 --checkpoint ck
    distir export-checkpoint ck -o adapters.safetensors --trained
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import distir_relax as dr

ROWS, STEPS, WIDTH, RANK = 99, 120, 48, 3
RATE = 1e-2
STRATEGY = "1/2/1/1"
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Attention over the rows of an image by 4 heads, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Digits(nn.Module):
    """A transformer whose tokens are the 8 rows of an image of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) / 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.rows(images) + self.places)).mean(1))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter: ``x W' + b + x A' B' s``."""

    def __init__(self, base: nn.Linear, rank: int = RANK, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        like = {"dtype": base.weight.dtype}
        self.a = nn.Parameter(torch.randn(rank, base.in_features, **like) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale

    def merged(self) -> nn.Linear:
        """Return one linear layer that computes the same."""
        layer = nn.Linear(self.base.in_features, self.base.out_features, dtype=self.base.weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(self.base.weight + self.scale * self.b @ self.a)
            layer.bias.copy_(self.base.bias)
        return layer


def adapt(model: nn.Module) -> nn.Module:
    """Freeze a model, and add adapters to the linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.modules():
        for name, layer in block.named_children() if isinstance(block, Block) else ():
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


def merge(model: nn.Module) -> nn.Module:
    """Replace adapted layers by merged ones, which have the names of the base."""
    for block in model.modules():
        for name, layer in block.named_children() if isinstance(block, Block) else ():
            if isinstance(layer, Adapted):
                setattr(block, name, layer.merged())
    return model


@cache
def images(rotated: bool) -> tuple[Batch, Batch]:
    """Return training and test images with their digits, as they are or `rotated` by a quarter turn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
    x = x.rot90(1, (1, 2)).contiguous() if rotated else x
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return (x[order[:1437]], y[order[:1437]]), (x[order[1437:]], y[order[1437:]])


def batches(start: int = 0, rotated: bool = True) -> Iterator[Batch]:
    """Yield batches from number `start` on, equal on all ranks."""
    (x, y), _ = images(rotated)
    while True:
        rows = torch.randint(len(x), (ROWS,), generator=torch.Generator().manual_seed(start))
        yield x[rows], y[rows]
        start += 1


def train(model: nn.Module, rate: float, rotated: bool, steps: int = STEPS) -> list[float]:
    """Train a model by torch on one process; return its losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _, (x, y) in zip(range(steps), batches(0, rotated), strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def base() -> nn.Module:
    """Return the base, trained on digits as they are."""
    torch.manual_seed(0)
    model = Digits()
    train(model, 3e-3, rotated=False)
    return model


def build() -> dr.Training:
    """Return the training of the adapters."""
    model = adapt(base())
    return dr.Training(model, F.cross_entropy, optimizer=dr.optim.AdamW(lr=RATE), example_batch=next(batches()))


def accuracy(model: nn.Module, rotated: bool) -> float:
    """Return the share of test images that a model classifies correctly."""
    _, (x, y) = images(rotated)
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def by_ranks(folder: Path) -> dict[str, torch.Tensor]:
    """Train on two ranks by the commands; return the adapters that they export, by name."""
    here, bundle, checkpoints = str(Path(__file__).resolve()), folder / "adapters.dist", folder / "ck"
    exported = folder / "adapters.safetensors"
    commands: list[list[object]] = [
        ["compile", f"{here}:build", "--train", "--strategy", STRATEGY, "-o", bundle, "--backend", "torch"],
        ["train", "-n", 2, bundle, "--data", f"{here}:batches", "--steps", STEPS, "--checkpoint", checkpoints],
        ["export-checkpoint", checkpoints, "-o", exported, "--trained"],
    ]
    for command in commands:
        subprocess.run([sys.executable, "-m", "distir_relax", *map(str, command)], check=True)
    return load_file(exported)


def main() -> None:
    torch.set_num_threads(1)
    plain = base()
    print(f"base: {accuracy(plain, False):.1%} of digits, {accuracy(plain, True):.1%} of rotated ones")
    theirs, ours = adapt(base()), adapt(base())
    names = {name for name, p in ours.named_parameters() if p.requires_grad}
    train(theirs, RATE, rotated=True)
    with tempfile.TemporaryDirectory() as folder:
        adapters = by_ranks(Path(folder))
    if set(adapters) != names:
        raise SystemExit(f"expected the adapters alone in the checkpoint, found {sorted(set(adapters) - names)[:4]}")
    ours.load_state_dict(adapters, strict=False)
    trained, total = sum(x.numel() for x in adapters.values()), sum(p.numel() for p in plain.parameters())
    theirs, ours = merge(theirs), merge(ours)
    expected = theirs.state_dict()
    apart = max(float((x - expected[name]).abs().max()) for name, x in ours.state_dict().items())
    print(f"trained {trained:,} numbers beside {total:,} on 2 ranks, merged into weights: {apart:.1e} from torch's")
    for name, model in (("torch", theirs), ("2 ranks", ours)):
        print(f"{name}: {accuracy(model, True):.1%} of rotated digits")
    if accuracy(ours, True) < 0.9:
        raise SystemExit("expected an accuracy of at least 90 %")


if __name__ == "__main__":
    main()
