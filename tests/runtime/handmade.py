"""Hand-written bundles for the runtime's tests: small programs whose answer numpy gives in a line."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distir_relax.bundle import Bundle, Manifest, Program, Shard, Tensor, TensorWeights
from distir_relax.layout import DeviceMesh

SUM_COLUMNS = """
import torch.nn.functional as F

STEPS = ["%h = matmul(%x, %up) (model.py:7)", "%y = matmul(%h, %down) (model.py:8)", "%z = all_reduce(%y) (model.py:8)"]


def main(comm, weights, x):
    h = F.relu(x @ weights["up"])
    y = h @ weights["down"]
    z = comm.all_reduce(y, "tp", "sum", step=2, out=y)
    return (z, h)
"""

RAISES_ON_1 = SUM_COLUMNS.replace(
    "    z =", "    if comm.rank == 1:\n        raise ValueError('a kernel failed')\n    z ="
)
WRONG_SHAPE = SUM_COLUMNS.replace("return (z, h)", "return (z, h[:, :1])")
DEADLOCK = """
STEPS = ["%a = all_reduce(%x) (model.py:2)", "%b = recv(%x) (model.py:3)", "send(%x) (model.py:4)"]


def main(comm, weights, x):
    n = comm.world_size
    a = comm.all_reduce(x, "tp", "sum", step=0)
    b = comm.recv((4, 6), "float32", (comm.rank + 1) % n, step=1)
    comm.send(x, (comm.rank - 1) % n, step=2)
    return (a, b)
"""


def cut(size: int, sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Consecutive intervals of the given sizes, one per index along an axis."""
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert starts[-1] == size
    return tuple(((a, b),) for a, b in itertools.pairwise(starts))


def ranked_text(sizes: Sequence[int], rows: int) -> str:
    """The ranked stage of `mlp_bundle`: a function for each distinct size."""
    functions = "".join(
        f"""
  func @main_{i}(
    input %x: f32[{rows},6],
    parameter %up: f32[6,{size}],
    parameter %down: f32[{size},5],
  ) {{
    %a: f32[{rows},{size}] = matmul(%x, %up)  # model.py:7
    %h: f32[{rows},{size}] = nn.relu(%a)  # model.py:7
    %y: f32[{rows},5] = matmul(%h, %down)  # model.py:8
    %z: f32[{rows},5] = all_reduce(%y) {{axis="tp", op="sum", step=2}}  # model.py:8
    return "z": %z, "h": %h
  }}"""
        for i, size in enumerate(dict.fromkeys(sizes))
    )
    names = [f"@main_{list(dict.fromkeys(sizes)).index(size)}" for size in sizes]
    mesh = f'  mesh[0] = device_mesh(({len(sizes)},), ("tp",))\n  ranks = ({", ".join(names)},)'
    return f"module @ranked {{\n{mesh}{functions}\n}}\n"


def mlp_bundle(sizes: Sequence[int], text: str = SUM_COLUMNS, rows: int = 4) -> Bundle:
    """`z = relu(x @ up) @ down`, the hidden dim split as `sizes`; outputs z (replicated) and the hidden h (split).

    In memory ranks run `text`, and so they do from files that are trusted; otherwise what `ranked_text` says.
    """
    hidden = sum(sizes)
    distinct = list(dict.fromkeys(sizes))
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(6, hidden, generator=generator)
    down = torch.randn(hidden, 5, generator=generator)
    columns = (Shard(0, 1, cut(hidden, sizes)),)
    manifest = Manifest(
        name="mlp",
        mesh=DeviceMesh((len(sizes),), ("tp",)),
        tail="ragged",
        schedule_hash=hashlib.sha256(text.encode()).hexdigest(),
        programs=tuple(
            Program(f"main_{i}", torch="programs/main_0.py", arguments=("x", "up", "down"))
            for i in range(len(distinct))
        ),
        ranks=tuple(map(distinct.index, sizes)),
        inputs=(Tensor("x", "float32", (rows, 6)),),
        outputs=(Tensor("z", "float32", (rows, 5)), Tensor("h", "float32", (rows, hidden), "S[1]", columns)),
        weights=(
            Tensor("up", "float32", (6, hidden), "S[1]", columns),
            Tensor("down", "float32", (hidden, 5), "S[0]", (Shard(0, 0, cut(hidden, sizes)),)),
        ),
    )
    weights = TensorWeights({"up": up, "down": down})
    texts = {"distir.txt": "%z = all_reduce(%y)\n", "ranked.txt": ranked_text(sizes, rows)}
    return Bundle(manifest, {"programs/main_0.py": text}, weights, texts)


def example_input(rows: int = 4) -> np.ndarray[Any, Any]:
    """An input for `mlp_bundle`."""
    return np.random.default_rng(3).standard_normal((rows, 6)).astype("float32")


def expected_outputs(bundle: Bundle, x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What `mlp_bundle` computes, in numpy and float64."""
    up, down = (
        bundle.weights.read(tensor.name, [[(0, size)] for size in tensor.shape]).double().numpy()
        for tensor in bundle.manifest.weights
    )
    hidden = np.maximum(x.astype("float64") @ up, 0)
    return {"z": hidden @ down, "h": hidden}
