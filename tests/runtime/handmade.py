"""Hand-written bundles for the runtime's tests: small programs whose answer numpy gives in a line."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from distir_relax.bundle import Bundle, Manifest, Mesh, Program, Shard, Tensor, TensorWeights

SUM_COLUMNS = '''
import torch.nn.functional as F

STEPS = ["%h = matmul(%x, %up) (model.py:7)", "%y = matmul(%h, %down) (model.py:8)", "%z = all_reduce(%y) (model.py:8)"]


def main(comm, weights, x):
    h = F.relu(x @ weights["up"])
    y = h @ weights["down"]
    z = comm.all_reduce(y, "tp", "sum", step=2, out=y)
    return (z, h)
'''


def cut(size: int, sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Consecutive intervals of the given sizes, one per index along an axis."""
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert starts[-1] == size
    return tuple(((a, b),) for a, b in zip(starts[:-1], starts[1:], strict=True))


def mlp_bundle(sizes: Sequence[int], text: str = SUM_COLUMNS, rows: int = 4) -> Bundle:
    """`z = relu(x @ up) @ down`, the hidden dim split as `sizes`; outputs z (replicated) and the hidden h (split)."""
    hidden = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(6, hidden, generator=generator)
    down = torch.randn(hidden, 5, generator=generator)
    columns = (Shard(0, 1, cut(hidden, sizes)),)
    manifest = Manifest(
        name="mlp",
        mesh=Mesh((len(sizes),), ("tp",)),
        tail="ragged",
        schedule_hash=hashlib.sha256(text.encode()).hexdigest(),
        programs=(Program("main_0", torch="programs/main_0.py", arguments=("x", "up", "down")),),
        ranks=(0,) * len(sizes),
        inputs=(Tensor("x", "float32", (rows, 6)),),
        outputs=(Tensor("z", "float32", (rows, 5)), Tensor("h", "float32", (rows, hidden), "S[1]", columns)),
        weights=(
            Tensor("up", "float32", (6, hidden), "S[1]", columns),
            Tensor("down", "float32", (hidden, 5), "S[0]", (Shard(0, 0, cut(hidden, sizes)),)),
        ),
    )
    weights = TensorWeights({"up": up, "down": down})
    return Bundle(manifest, {"programs/main_0.py": text}, weights, {"distir.txt": "schedule\n"})
