"""No communication is left out, doubled or moved on TVM's machine, whatever its passes make of empty results."""

from __future__ import annotations

from pathlib import Path

import empty_shards
import pytest
import torch
from test_threads import on_all_ranks

import distir_relax as dr
from distir_relax import ir
from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.emit.relax import to_relax
from distir_relax.ops import TABLE, Trait, check
from tests.runtime.processes import mpirun

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.timeout(120)

from distir_relax.runtime.backends.tvm.compile import calls_of, check_schedule  # noqa: E402


class TwoUses(torch.nn.Module):
    """Of 3 rows on 4 ranks one has none: what it reduces and scatters, it only passes on."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.w = torch.nn.Parameter(torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).double())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = dr.annotate_sharding(x @ dr.annotate_sharding(self.w, self.mesh, "S[0]"), self.mesh, "S[0]")
        z = dr.annotate_sharding(y * 2, self.mesh, "R")
        return z + x[:, :5], y / 3, y - z


@pytest.mark.parametrize(("ranks", "tail"), [(2, "ragged"), (3, "pad"), (4, "ragged"), (5, "pad")])
def test_a_result_without_elements_is_communicated_all_the_same(ranks: int, tail: str) -> None:
    model = TwoUses(DeviceMesh((ranks,), ("tp",)))
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).double()
    plan = dr.compile(model, (x,), tail=tail)
    with torch.no_grad():
        expected = model(x)
    for found, value in zip(plan(x, backend="tvm"), expected, strict=True):
        torch.testing.assert_close(found, value, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("ranks", empty_shards.ROWS)
def test_every_communication_on_ranks_that_hold_nothing(ranks: int) -> None:
    module = empty_shards.ranked_module(ranks)
    ir.verify(module, check)
    compiled = [empty_shards.compiled_program(module, rank) for rank in range(ranks)]
    mesh = DeviceMesh((ranks,), ("tp",))
    on_all_ranks(mesh, lambda comm: empty_shards.check_rank(comm, module, compiled[comm.rank]))


@pytest.mark.sweep
@pytest.mark.mpirun
def test_the_same_under_mpirun() -> None:
    done = mpirun(3, Path(__file__).parent / "empty_shards.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == sorted(["", *(f"rank {r} right" for r in range(3))])


def test_the_programs_above_have_every_communication() -> None:
    ours = {entry.name for entry in TABLE.entries() if Trait.COMMUNICATES in entry.traits}
    assert ours == {op.name for op in empty_shards.ranked_module(4).functions[0].ops if "step" in op.attrs}


@pytest.mark.parametrize("names", [["default_build"], ["zero", "default_build"]], ids=str)
def test_tvms_own_pipelines_keep_the_order_too(names: list[str]) -> None:
    """Ours is one of many: the chain of tokens holds in all."""
    from tvm import relax

    module = empty_shards.ranked_module(4)
    passes = tvm.transform.Sequential([relax.get_pipeline(name) for name in names])
    text = relax.build(to_relax(module), "llvm", relax_pipeline=passes).as_text()
    for function in module.functions:
        expected = [f"{op.name} {op.attrs['step']}" for op in function.ops if "step" in op.attrs]
        assert calls_of(text, function.name) == expected


def test_an_executable_with_another_order_is_not_run() -> None:
    module = empty_shards.ranked_module(4)
    calls = [f"{op.name} {op.attrs['step']}" for op in module.functions[0].ops if "step" in op.attrs]
    executable = empty_shards.compiled_program(module, 0).executable
    check_schedule(executable, calls)
    for wrong in (calls[:-1], [*calls, calls[0]], [*calls[1:2], calls[0], *calls[2:]]):
        with pytest.raises(RunError, match=r"changed the order of communication: as call \d+ expected"):
            check_schedule(executable, wrong)
