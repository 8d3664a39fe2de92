"""Random models with weights of 8 and 4 bits, on both backends.

``python -m tests.precision.random_quantized_models 300`` runs 300.

Each has a table of embeddings, linear layers with and without biases, some of which have experts, and perhaps a
classifier that shares the table, of odd sizes where the format allows it; it is compiled under a drawn mesh, drawn
shardings and a drawn tail. What it gives is compared with the same model whose weights are dequantized.
`test_random_quantized.py` takes some of them.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  # has the op
from torch import nn

from distir_relax.compiler.compile import compile_source
from distir_relax.compiler.options import complete
from distir_relax.compiler.source import Source
from distir_relax.frontends.imported_model import snapshot
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.kernels.quantized import (
    GROUP,
    dequantize,
    linear,
    quantize_int4,
    quantize_int8,
    quantize_int8_groups,
)
from distir_relax.precision import quantize_weights

QUANTIZE = {"int8": quantize_int8_groups, "int8-channel": quantize_int8, "int4": quantize_int4}
MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (5,), (2, 2))
ODD = (1, 5, 31, 97, 127)


class Mixture(nn.Module):
    """A layer of which each row has one of several weights, sorted by these as transformers does."""

    def __init__(self, experts: int, inner: int, columns: int) -> None:
        super().__init__()
        self.route = nn.Linear(inner, experts, bias=False)
        self.weights = nn.Parameter(torch.randn(experts, columns, inner) / inner**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, ids = len(self.weights), self.route(x).argmax(-1).flatten()
        order = ids.argsort()
        ends = torch.histc(ids.float(), bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        rows = x.flatten(0, 1)[order]
        y = torch.ops.transformers.grouped_mm_fallback(rows, self.weights.transpose(1, 2), ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        return y[places].view(*x.shape[:-1], -1)


class Network(nn.Module):
    """Embeddings, layers with a residual sum where sizes agree, and a classifier."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = GROUP * rng.randint(1, 4)
        self.table = nn.Embedding(rng.choice((37, 64, 101)), width)
        sizes = [width, *(GROUP * rng.randint(1, 5) for _ in range(rng.randint(1, 3)))]
        self.layers = nn.ModuleList(
            Mixture(rng.randint(2, 5), a, b) if rng.random() < 0.3 else nn.Linear(a, b, bias=rng.random() < 0.5)
            for a, b in itertools.pairwise(sizes)
        )
        self.is_tied = sizes[-1] == width and rng.random() < 0.7
        self.head = nn.Linear(sizes[-1], self.table.num_embeddings if self.is_tied else rng.choice(ODD), bias=False)
        if self.is_tied:
            self.head.weight = self.table.weight
        self.act = rng.choice((torch.relu, torch.tanh, nn.functional.silu))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            y = self.act(layer(x))
            x = x + y if x.shape == y.shape else y
        return self.head(x)


def check(seed: int) -> str:
    """Check the model of a seed on both backends; return the drawn options. Inputs of products must not be rounded."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    precision, quantize = rng.choice(tuple(QUANTIZE.items()))
    mesh, tail = rng.choice(MESHES), rng.choice(("ragged", "pad"))
    model = Network(rng).eval()
    ids = torch.randint(model.table.num_embeddings, (rng.choice((2, 3, 7)), rng.choice((1, 5))))
    imported = snapshot(import_torch(model, (ids,), {}))
    shardings = {
        name: ", ".join(rng.choice([*(f"S[{dim}]" for dim in range(value.dim())), "R"]) for _ in mesh)
        for name, value in model.named_parameters()
        if value.dim() > 1 and rng.random() < 0.6
    }
    drawn = f"{seed}: {precision} on {mesh}, {tail}, {shardings}"
    quantized = quantize_weights(imported, precision)
    # Scales follow the values.
    annotations = {f"{name}.values": where for name, where in shardings.items() if f"{name}.values" in quantized.names}
    annotations = annotations or {"ids": ", ".join("R" for _ in mesh)}
    options: dict[str, Any] = {"mesh": mesh, "shardings": annotations, "tail": tail}
    plan = compile_source(Source(quantized, complete(options, "network")))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if f"{name}.values" in quantized.names:
                of_table = quantize_int8_groups if precision == "int4" else quantize
                for matrix in weight if weight.dim() == 3 else [weight]:
                    matrix.copy_(dequantize(*(of_table if weight is model.table.weight else quantize)(matrix)))
        expected = model(ids)
    for backend in ("torch", "tvm"):
        found = plan(ids, backend=backend)
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, backend=backend: f"{drawn}, {backend}: {text}"
        )
    return drawn


def main(count: int) -> int:
    """Check so many models, and print those that fail."""
    warnings.simplefilter("ignore")
    linear._kernel = lambda *arguments: None  # type: ignore[assignment]
    failed = 0
    for seed in range(count):
        try:
            check(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)
    print(f"{failed} of {count} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
