"""What a plan and a session hold is theirs: weights as they were compiled, results that nothing reads later."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import example_input, expected_outputs, mlp_bundle
from safetensors.torch import save_file

import distir_relax as dr
from distir_relax import annotate_sharding
from distir_relax.bundle import read_bundle, write_bundle
from distir_relax.errors import BundleError
from distir_relax.runtime.session import Session
from distir_relax.support.deferred_tensor import read_deferred

MESH = dr.DeviceMesh((3,), ("tp",))


class TwoProducts(torch.nn.Module):
    """One weight whose shards are views, one whose shards are copies, and a buffer that becomes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(7, 5))
        self.columns = torch.nn.Parameter(torch.randn(5, 7))
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ annotate_sharding(self.rows, MESH, "S[0]")
        return h @ annotate_sharding(self.columns, MESH, "S[1]") + self.offset * 2


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_a_plan_has_the_weights_that_it_was_compiled_with(backend: str, tmp_path: Path) -> None:
    model, x = TwoProducts(), torch.randn(3, 7)
    expected = model(x).detach()
    plan = dr.compile(model, (x,))
    late = dr.compile(model, (x,))
    torch.testing.assert_close(plan(x, backend=backend), expected)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    torch.testing.assert_close(plan(x, backend=backend), expected)
    torch.testing.assert_close(late(x, backend=backend), expected)
    late.save(tmp_path / "late.dist")
    torch.testing.assert_close(dr.load(tmp_path / "late.dist")(x, backend=backend), expected)


def test_a_program_of_tensors_has_them_as_they_were() -> None:
    plan = dr.compile(TwoProducts(), (torch.randn(3, 7),))
    tensors = {name: tensor.clone() for name, tensor in plan.imported.tensors.items()}
    second = dr.compile((plan.imported.module, tensors))
    x = torch.randn(3, 7)
    expected = second(x)
    for tensor in tensors.values():
        tensor.zero_()
    torch.testing.assert_close(second(x), expected)


class GivesAll(torch.nn.Module):
    """Returns a weight, a view of one, an input, a view of an input, and a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 5))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(1)
        split = annotate_sharding(x @ self.weight, MESH, "S[1]")
        return self.weight, self.weight.view(5, 7), x, x.view(7, 3), self.count, split


@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_results_may_be_written_into(backend: str) -> None:
    model, x = GivesAll(), torch.randn(3, 7)
    plan = dr.compile(model, (x,))
    given = x.clone()
    for _ in range(3):
        expected = [t.detach().clone() for t in model(x)]
        found = plan(x, backend=backend)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.equal(x, given)
        for tensor in found:
            tensor.fill_(1e9)
        assert torch.equal(x, given)


@pytest.mark.parametrize("sizes", [[3], [1, 2, 0, 4]], ids=str)
def test_weights_that_vanish_after_loading_are_not_missed(tmp_path: Path, sizes: list[int]) -> None:
    path = write_bundle(mlp_bundle(sizes), tmp_path / "m.dist")
    session = Session(read_bundle(path))
    with (path / "weights.safetensors").open("r+b") as file:
        file.truncate(10)
    found = session({"x": example_input()})
    expected = expected_outputs(mlp_bundle(sizes), example_input())
    np.testing.assert_allclose(found["z"].numpy(), expected["z"], rtol=1e-5, atol=1e-5)


def test_weights_that_change_between_the_check_and_the_reading_are_refused(tmp_path: Path) -> None:
    path = write_bundle(mlp_bundle([3, 0, 2]), tmp_path / "m.dist")
    file = path / "weights.safetensors"
    size = file.stat().st_size
    for change in ("truncate", "write"):
        bundle = read_bundle(path)
        content = file.read_bytes()
        if change == "truncate":
            os.truncate(file, size - 40)
        else:
            file.write_bytes(content[:-8] + b"\0" * 8)
        with pytest.raises(BundleError, match=r"truncated while they were read|modified while they were read"):
            Session(bundle)
        file.write_bytes(content)
    # Another file in its place is not seen: this one is open.
    bundle = read_bundle(path)
    (tmp_path / "new").write_bytes(content[:-8] + b"\0" * 8)
    (tmp_path / "new").replace(file)
    found = Session(bundle)({"x": example_input()})
    np.testing.assert_allclose(
        found["z"].numpy(), expected_outputs(mlp_bundle([3, 0, 2]), example_input())["z"], rtol=1e-5, atol=1e-5
    )
    with pytest.raises(BundleError, match="damaged"):
        read_bundle(path)


class Wide(torch.nn.Module):
    """A weight of many pages."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(701, 503, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ annotate_sharding(self.weight, MESH, "S[0]")


def test_a_weight_of_a_checkpoint_that_vanishes_is_not_missed(tmp_path: Path) -> None:
    given = Wide("cpu").weight.detach()
    save_file({"weight": given}, str(tmp_path / "model.safetensors"))
    plan = dr.compile(Wide("meta"), (torch.randn(3, 701, device="meta"),), checkpoint=tmp_path / "model.safetensors")
    held = read_deferred(plan.imported.tensors["weight"])
    os.truncate(tmp_path / "model.safetensors", 10)
    assert torch.equal(held, given)
