"""Indices out of range end the run with the op, its place, the index and what is valid, whatever is split."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.errors import ImportModelError, RunError, UnsupportedOpError
from distir_relax.frontends.relax import import_relax
from tests.runtime.processes import mpirun

MESH = dr.DeviceMesh((3,), ("tp",))
ROWS = 7

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CALLS: dict[str, Call] = {
    "embedding": lambda x, ids: F.embedding(ids, x),
    "index": lambda x, ids: x[ids],
    "index of points": lambda x, ids: x[ids, torch.tensor([0, 3, 1])],
    "index_select": lambda x, ids: x.index_select(0, ids),
    "gather": lambda x, ids: x.gather(0, ids[:, None].expand(3, 4)),
    "scatter": lambda x, ids: x.scatter(0, ids[:, None].expand(3, 4), x[:3]),
    "scatter of a part": lambda x, ids: x.scatter(0, ids[:, None], x[:3]),
    "scatter_add": lambda x, ids: x.scatter_add(0, ids[:, None].expand(3, 4), x[:3]),
    "scatter_reduce": lambda x, ids: x.scatter_reduce(0, ids[:, None].expand(3, 4), x[:3], "amax"),
    "index_add": lambda x, ids: x.index_add(0, ids, x[:3]),
    "index_copy": lambda x, ids: x.index_copy(0, ids, x[:3]),
    "index_fill": lambda x, ids: x.index_fill(0, ids, 3),
    "index_put": lambda x, ids: x.index_put((ids,), x[:3]),
    "index_put that adds": lambda x, ids: x.index_put((ids,), x[:3], accumulate=True),
    "one_hot": lambda x, ids: F.one_hot(ids, ROWS).float() @ x,
    "take_along_dim": lambda x, ids: torch.take_along_dim(x, ids[:, None], 0),
}
PLACEMENTS: list[dict[str, str]] = [{"x": "S[0]"}, {"x": "S[1]"}, {"ids": "S[0]"}, {"x": "R"}]
GOOD, BAD = torch.tensor([0, 6, 3]), [torch.tensor([0, 3, n]) for n in (ROWS, 10**8, -1, -ROWS - 1)]


class Look(torch.nn.Module):
    """One call, whose result all ranks sum up."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.call(x, ids) * 2


def check(name: str, shardings: dict[str, str], tail: str, backend: str = "torch") -> None:
    """The plan gives what the model does, and raises where that raises."""
    torch.manual_seed(0)
    model, x = Look(CALLS[name]), torch.randn(ROWS, 4)
    plan = dr.compile(model, (x, GOOD), shardings=shardings, mesh=MESH, tail=tail)
    for ids in (GOOD, *BAD, GOOD):
        try:
            expected = model(x, ids)
        except (IndexError, RuntimeError):
            with pytest.raises(
                RunError, match=rf"{name.split()[0]}.* index {ids[2]}, .*: valid are from .* to 6"
            ) as wrong:
                plan(x, ids, backend=backend)
            assert wrong.value.where.startswith("test_indices.py:")
        else:
            torch.testing.assert_close(plan(x, ids, backend=backend), expected)


@pytest.mark.drawn(20)
@pytest.mark.parametrize("shardings", PLACEMENTS)
@pytest.mark.parametrize("name", CALLS)
def test_an_index_out_of_range_raises(name: str, shardings: dict[str, str]) -> None:
    for tail in ("ragged", "pad") if shardings == {"x": "S[0]"} else ("ragged",):
        check(name, shardings, tail)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["embedding", "gather", "index", "index_add", "scatter"])
def test_an_index_out_of_range_raises_on_tvm(name: str) -> None:
    pytest.importorskip("tvm")
    for shardings in PLACEMENTS[1:3]:
        check(name, shardings, "ragged", "tvm")


def test_in_a_repeated_block_the_place_is_the_blocks() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).sum(-1).long() + 2

    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block() for _ in range(3)))
    for block in blocks:
        block.table.weight.data.fill_(0.1)
    blocks[2].table.weight.data.fill_(0)
    plan = dr.compile(blocks, (GOOD,), shardings={"*.table.weight": "S[0]"}, mesh=MESH)
    assert len(plan.modules["sharded"].functions) == 2
    torch.testing.assert_close(plan(GOOD), blocks(GOOD))
    with pytest.raises(RunError, match="embedding is given the index 8") as raised:
        plan(GOOD + 2)
    assert raised.value.where.startswith("table, ")


def test_an_index_of_a_dim_without_elements() -> None:
    plan = dr.compile(Look(CALLS["index"]), (torch.ones(0, 4), GOOD[:0]), shardings={"x": "S[1]"}, mesh=MESH)
    assert plan(torch.ones(0, 4), GOOD[:0]).shape == (0, 4)
    with pytest.raises(ImportModelError, match=r"index 0, .* valid are none, since the dim has no elements"):
        dr.compile(Look(lambda x, ids: x[torch.tensor([0])]), (torch.ones(0, 4), GOOD[:0]), mesh=MESH)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1])
def test_an_index_that_is_known_is_looked_at_when_the_model_is_compiled(index: int) -> None:
    model = Look(lambda x, ids: x[torch.tensor([0, index])])
    with pytest.raises(ImportModelError, match=f"index is given the index {index}, which is out of range") as raised:
        dr.compile(model, (torch.ones(ROWS, 4), GOOD), shardings={"x": "S[0]"}, mesh=MESH)
    assert raised.value.where.startswith("test_indices.py:")
    plan = dr.compile(Look(lambda x, ids: x[torch.tensor([0, -ROWS])]), (torch.ones(ROWS, 4), GOOD), mesh=3)
    assert "check_indices" not in plan.text("global")


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap", "nan"])
def test_relax_says_what_becomes_of_an_index_out_of_range(mode: str) -> None:
    pytest.importorskip("tvm")
    from tvm import relax

    builder = relax.BlockBuilder()
    x, ids = relax.Var("x", relax.TensorType((ROWS, 4), "float32")), relax.Var("ids", relax.TensorType((3,), "int64"))
    with builder.function("main", [x, ids]):
        builder.emit_func_output(builder.emit(relax.op.take(x, ids, 0, mode)))
    if mode == "nan":
        with pytest.raises(UnsupportedOpError, match="returns NaN for indices out of range"):
            import_relax(builder.get())
        return
    plan = dr.compile(builder.get(), shardings={"x": "S[0]"}, mesh=MESH)
    data = torch.randn(ROWS, 4)
    for bad in BAD:
        if mode == "fast":
            with pytest.raises(RunError, match=f"take is given the index {bad[2]}"):
                plan(data, bad)
        else:
            meant = bad.clamp(0, ROWS - 1) if mode == "clip" else bad % ROWS
            torch.testing.assert_close(plan(data, bad), data[meant])


@pytest.mark.mpirun
@pytest.mark.timeout(120)
def test_a_rank_that_finds_one_ends_the_launch(tmp_path: Path) -> None:
    """The index is one rank's alone, and the others wait for it in the sum behind."""
    x = torch.randn(ROWS, 4)
    model = Look(lambda x, ids: F.embedding(ids, x).sum(0))
    plan = dr.compile(model, (x, GOOD), shardings={"ids": "S[0]"}, mesh=MESH)
    plan.save(tmp_path / "plan.dist", backends=("torch",))
    arguments: list[Any] = ["-m", "distir_relax", "run", tmp_path / "plan.dist", "--input", tmp_path / "in.npz"]
    arguments += ["--output", tmp_path / "out.npz", "--timeout", "60"]
    np.savez(tmp_path / "in.npz", x=x.numpy(), ids=BAD[0].numpy())
    start = time.monotonic()
    done = mpirun(3, *arguments)
    assert done.returncode == 2, done.stderr
    assert "embedding is given the index 7, which is out of range: valid are from 0 to 6" in done.stderr
    assert "test_indices.py:" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 45
    assert not (tmp_path / "out.npz").exists()
