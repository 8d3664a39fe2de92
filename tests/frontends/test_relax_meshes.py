"""Several meshes in a Relax module: places of one mesh, between which values are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distir_relax as dr
from distir_relax.errors import AnnotationError, PlacementError
from distir_relax.ir import Module
from distir_relax.layout import DeviceMesh
from tests.frontends.relax_modules import HEAD, script
from tests.runtime.processes import mpirun


def head(places: int, size: int) -> str:
    """A module of `places` meshes of `size` devices."""
    meshes = ", ".join(f"R.device_mesh(({size},), I.Range({i * size}, {(i + 1) * size}))" for i in range(places))
    return HEAD.replace("R.device_mesh((2,), I.Range(0, 2))", meshes).replace(": 2}", f": {places * size}}}")


STAGES = """
    @R.function
    def main(x: R.Tensor((6, 5), "float32"), w: R.Tensor((5, 7), "float32"), v: R.Tensor((7, 3), "float32")):
        one = R.const(1.0, "float32")
        w1 = R.dist.annotate_sharding(w, device_mesh="mesh[0]", placement="S[1]")
        h = R.add(R.nn.gelu(R.matmul(x, w1)), one)
        g = R.dist.annotate_sharding(h, device_mesh="mesh[1]", placement="S[0]")
        v1 = R.dist.annotate_sharding(v, device_mesh="mesh[1]", placement="R")
        y = R.add(R.matmul(g, v1), one)
        z = R.dist.annotate_sharding(y, device_mesh="mesh[0]", placement="R")
        return (R.multiply(z, one), g)
"""


def data() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((6, 5), (5, 7), (7, 3)))


def check(results: Any) -> None:
    x, w, v = data()
    hidden = torch.nn.functional.gelu(x @ w) + 1
    for found, expected in zip(results, (hidden @ v + 1, hidden), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "backend", "tail"), [(1, "torch", "pad"), (2, "tvm", "ragged"), (3, "torch", "pad"), (3, "tvm", "ragged")]
)
def test_values_go_from_place_to_place(size: int, backend: str, tail: str) -> None:
    plan = dr.compile(script(STAGES, head(2, size)), tail=tail)
    assert plan.mesh == DeviceMesh((2, size), ("place", "axis0"))
    check(plan(*data(), backend=backend))
    main = plan.modules["distributed"].main
    first, second = tuple(range(size)), tuple(range(size, 2 * size))
    assert [item.value.placed.devices for item in main.inputs] == [first, first, second]
    assert [op.results[0].placed.devices for op in main.ops if op.name == "send"] == [second, first]


TYPED = """
    @R.function
    def main(
        x: R.DTensor((8, 6), "float32", "mesh[0]", "S[0]"), w: R.DTensor((6, 4), "float32", "mesh[0]", "R")
    ) -> R.DTensor((8, 4), "float32", "mesh[1]", "R"):
        y: R.DTensor((8, 4), "float32", "mesh[0]", "S[0]") = R.matmul(x, w)
        z: R.DTensor((8, 4), "float32", "mesh[1]", "S[0]") = R.dist.redistribute(
            y, device_mesh="mesh[1]", placement="S[0]"
        )
        u: R.DTensor((8, 4), "float32", "mesh[1]", "R") = R.dist.redistribute(z, device_mesh="mesh[1]", placement="R")
        return u
"""


def test_the_redistribution_of_the_rfc_sends_shards() -> None:
    plan = dr.compile(script(TYPED, head(2, 2)))
    assert [op.name for op in plan.modules["distributed"].main.ops] == ["matmul", "send", "all_gather"]
    x, w = torch.randn(8, 6), torch.randn(6, 4)
    torch.testing.assert_close(plan(x, w), x @ w, atol=1e-5, rtol=1e-5)


def test_an_op_at_two_places_is_named() -> None:
    text = STAGES.replace("h = R.add(R.nn.gelu(R.matmul(x, w1)), one)", "u = R.matmul(w1, v1)\n        h = x")
    text = text.replace("        v1 =", "        # v1 =").replace("        u =", ANNOTATED + "        u =")
    with pytest.raises(
        PlacementError, match=r"@main, u: matmul has operands at several places: %w1, [\s\S]*redistribute"
    ):
        dr.compile(script(text.replace("(R.multiply(z, one), g)", "(z, g, u)").replace("g, v1", "g, w1"), head(2, 2)))


ANNOTATED = '        v1 = R.dist.annotate_sharding(v, device_mesh="mesh[1]", placement="R")\n'


@pytest.mark.parametrize("other", ["R.device_mesh((4,), I.Range(0, 4))", "R.device_mesh((2,), I.Range(1, 3))"])
def test_meshes_are_equal_groups(other: str) -> None:
    text = HEAD.replace("I.Range(0, 2))]", f"I.Range(0, 2)), {other}]")
    with pytest.raises(
        AnnotationError, match=r"meshes of one shape|in order, starting at a multiple of 2, found \[1, 2\]"
    ):
        dr.compile(script(STAGES, text))


@pytest.mark.mpirun
def test_places_under_mpirun(tmp_path: Path) -> None:
    plan = dr.compile(script(STAGES, head(2, 2)))
    path = plan.save(tmp_path / "m.dist", backends=("torch",))
    np.savez(tmp_path / "x.npz", **dict(zip("xwv", (x.numpy() for x in data()), strict=True)))
    files = ["--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz"]
    done = mpirun(4, "-m", "distir_relax", "run", path, *files)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "y.npz")
    check([found[o.name] for o in plan.modules["sharded"].main.outputs])


def test_a_module_that_names_one_mesh_has_one_place() -> None:
    plan = dr.compile(script(STAGES.replace("mesh[1]", "mesh[0]")))
    module: Module = plan.modules["distributed"]
    assert module.meshes[0].axes == ("axis0",)
    assert "send" not in {op.name for op in module.main.ops}
    check(plan(*data()))
