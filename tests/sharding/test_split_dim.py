"""Ops that look along the very dim that is split: they work, by communication where they must, and never refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret
from distir_relax.layout import DeviceMesh, Shard
from tests.compiled import check_results, compiled

IDS = torch.tensor([[0, 6, 3], [5, 5, 1]])
VECTOR = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)

# Each takes a tensor of (2, 7, 3) whose dim 1 is split.
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer norm": lambda x: F.layer_norm(x.transpose(1, 2), (7,), VECTOR, VECTOR.flip(0)),
    "RMS norm": lambda x: F.rms_norm(x.transpose(1, 2), (7,), VECTOR),
    "batch norm of split channels": lambda x: F.batch_norm(x, VECTOR, VECTOR.square() + 0.5, VECTOR, VECTOR),
    "batch norm of split pictures": lambda x: F.batch_norm(
        x.transpose(1, 2), VECTOR[:3], VECTOR[:3].square() + 0.5, VECTOR[:3], VECTOR[:3]
    ),
    "group norm of split channels": lambda x: F.group_norm(x, 7, VECTOR, VECTOR),
    "group norm of one group": lambda x: F.group_norm(x, 1, VECTOR, VECTOR),
    "group norm of split pictures": lambda x: F.group_norm(x.transpose(1, 2), 3, VECTOR[:3], VECTOR[:3]),
    "max": lambda x: x.amax(1),
    "max with its place": lambda x: x.max(1),
    "min": lambda x: x.amin((0, 1)),
    "mean": lambda x: x.mean(1),
    "variance": lambda x: x.var(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "top-k": lambda x: x.topk(4, 1),
    "sort": lambda x: x.sort(1),
    "cumsum": lambda x: x.cumsum(1),
    "gather": lambda x: x.gather(1, IDS.unsqueeze(-1).expand(2, 3, 3)),
    "scatter": lambda x: x.scatter(1, IDS.reshape(2, 3, 1), 3 * x),
    "scatter_add": lambda x: x.scatter_add(1, IDS.unsqueeze(-1).expand(2, 3, 3), x[:, :3]),
    "index_add": lambda x: x.index_add(1, IDS[0], x[:, 1:4]),
    "index_copy": lambda x: x.index_copy(1, IDS[0], x[:, 2:5]),
    "index_select": lambda x: x.index_select(1, IDS[0]),
    "indexing": lambda x: x[:, IDS],
    "embedding": lambda x: F.embedding(IDS, x[0]),
    "where": lambda x: torch.where(x > 0.2, x, x.flip(1)),
    "masked_fill": lambda x: x.masked_fill(torch.arange(7).reshape(7, 1) > 4, -2.0),
    "one-hot": lambda x: F.one_hot(x.argmax(2), 7),
    "split": lambda x: x.split([2, 4, 1], 1),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(1)[5],
    "select": lambda x: x[:, 4],
    "concat": lambda x: torch.cat([x, 2 * x[:, :3], x.flip(0)], 1),
    "stack": lambda x: torch.stack([x, x.square()], 1),
    "slice": lambda x: x[:, 1:6],
    "strided slice": lambda x: x[:, 1::3],
    "pad": lambda x: F.pad(x, (0, 0, 2, 1), value=0.5),
    "pad with a negative width": lambda x: F.pad(x, (0, 0, -2, 1)),
    "reflecting pad": lambda x: F.pad(x.transpose(1, 2), (2, 3), mode="reflect"),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(2, 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: x.triu(1),
    "einsum over it": lambda x: torch.einsum("btd,bsd->bts", x, x),
    "reshape": lambda x: x.reshape(2, 21),
}

LAYOUTS = {
    "3": (DeviceMesh((3,), ("x",)), "S[1]"),
    "5": (DeviceMesh((5,), ("x",)), "S[1: 3|0|1|1|2]"),
    "2x3": (DeviceMesh((2, 3), ("x", "y")), "S[1], S[1]"),
}


class Named(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = OPS[self.name](x)
        return found if isinstance(found, torch.Tensor) else tuple(found)


@pytest.mark.drawn(16)
@pytest.mark.parametrize("name", OPS)
def test_ops_along_a_split_dim(name: str) -> None:
    x = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model = Named(name)
    whole = model(x)
    imported = import_torch(model, (x,))
    inputs = {**imported.tensors, "x": x}
    expected = [whole] if isinstance(whole, torch.Tensor) else list(whole)
    for value, right in zip(interpret(imported.module.main, inputs).values(), expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9)
    for mesh, placement in LAYOUTS.values():
        for tail in ("ragged", "pad"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stages = compiled(imported.module, tail, mesh, {"x": placement}, imported.names)
            kind = next(i.value.dtensor for i in stages["sharded"].main.inputs if i.value.name == "x")
            assert all(isinstance(p, Shard) and p.dim == 1 for p in kind.placements)
            check_results(stages, inputs)
