"""Real launches: compiled on disk, run by mpirun on 2, 3 and 5 ranks, by torchrun, and by neither."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import distir_relax as dr
from tests.imported_once import compile_case
from tests.runtime.processes import mpirun, python, torchrun
from tests.zoo import Case, gpt2, made_once, minilm, mlp, resnet, uneven_unet

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(180)]
SEVERAL_RUNS = Path(__file__).parent / "runtime" / "several_runs.py"


def saved(case: Case, ranks: int, tail: str, folder: Path, backends: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Compile for `ranks` in a row; see `saved_on`."""
    return saved_on(dr.DeviceMesh((ranks,), ("tp",)), case, tail, folder, backends)


def saved_on(
    mesh: dr.DeviceMesh, case: Case, tail: str, folder: Path, backends: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Compile into ``plan.dist`` with its inputs in ``in.npz``; what unsharded torch gives."""
    plan = compile_case(case, shardings=case.shardings, mesh=mesh, tail=tail)
    plan.save(folder / "plan.dist", backends=backends)
    inputs = plan.imported.flatten(case.args, case.kwargs)
    np.savez(folder / "in.npz", **{name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.no_grad():
        expected = case.model(*case.args, **case.kwargs)
    if isinstance(expected, torch.Tensor):
        expected = {"output": expected}
    return {key: value.numpy() for key, value in expected.items() if isinstance(value, torch.Tensor)}


def run_arguments(folder: Path, backend: str = "torch") -> list[object]:
    return [
        "run", folder / "plan.dist", "--input", folder / "in.npz", "--output", folder / "out.npz", "--backend", backend,
        "--timeout", "60", "--repeat", "6",
    ]  # fmt: skip


def agrees(folder: Path, expected: dict[str, np.ndarray], limit: float) -> None:
    found = np.load(folder / "out.npz")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert np.abs(found[key] - value).max() < limit


def grid() -> Case:
    """Sizes that no number of ranks divides, split along both axes of a grid."""
    return replace(mlp(13, 127), shardings={"0.weight": "S[0], S[0]"})


def short_gpt2() -> Case:
    return gpt2(layers=1)


# On meshes of these shapes: a model, the backend that runs it, and what is done about uneven sizes.
RUNS: dict[tuple[int, ...], list[tuple[Callable[[], Case], str, str]]] = {
    (2,): [(gpt2, "torch", "pad"), (mlp, "tvm", "ragged")],
    (3,): [
        (short_gpt2, "tvm", "pad"), (resnet, "torch", "ragged"), (uneven_unet, "torch", "pad"),
    ],
    (4,): [(gpt2, "torch", "ragged"), (resnet, "tvm", "pad")],
    (5,): [(gpt2, "torch", "pad"), (mlp, "tvm", "ragged"), (minilm, "torch", "ragged")],
    (2, 3): [(grid, "torch", "ragged"), (grid, "tvm", "pad")],
}  # fmt: skip


@pytest.mark.drawn(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", RUNS, ids=lambda shape: f"{'x'.join(map(str, shape))} ranks")
def test_models(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Languages and pictures, with halos between processes, weights split along one axis or both: in one launch, since
    ranks take longer to start than to run."""
    expected, commands = [], []
    for number, (make, backend, tail) in enumerate(RUNS[shape]):
        folder = tmp_path / str(number)
        folder.mkdir()
        mesh = dr.DeviceMesh(shape, ("a", "b")[: len(shape)])
        expected.append(saved_on(mesh, made_once(make), tail, folder, (backend,)))
        more = ["--report", folder / "report.json"] if make is minilm else []
        commands.append(json.dumps([*map(str, [*run_arguments(folder, backend), *more])]))
    (tmp_path / "commands").write_text("\n".join(commands))
    done = mpirun(math.prod(shape), SEVERAL_RUNS, tmp_path / "commands", limit=200)
    assert done.returncode == 0, done.stderr
    for number, (make, _, _) in enumerate(RUNS[shape]):
        rough = make in (resnet, uneven_unet, short_gpt2)
        agrees(tmp_path / str(number), expected[number], 1e-4 if rough else 1e-5)


def test_the_same_bundle_under_torchrun_and_as_threads(tmp_path: Path) -> None:
    expected = saved(made_once(short_gpt2), 2, "ragged", tmp_path, ("torch",))
    for launch in (lambda: torchrun(2, "-m", "distir_relax", *run_arguments(tmp_path)),
                   lambda: python("-m", "distir_relax", *run_arguments(tmp_path))):  # fmt: skip
        done = launch()
        assert done.returncode == 0, done.stderr
        agrees(tmp_path, expected, 1e-5)
        (tmp_path / "out.npz").unlink()


class Second(torch.nn.Module):
    """Adds its second row: a guard of the exported program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[:, 1:2]


SECOND = Second.forward.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 7, 4), "dim 0 of input 'x': expected batch of at least 1 and at most 8, found 9"),
        ((2, 1, 4), f"test_mpirun.py:{SECOND}: expected length >= 2, found length = 1"),
        ((1, 31, 4), ""),
    ],
)
def test_sizes_of_calls(tmp_path: Path, shape: tuple[int, ...], message: str) -> None:
    """Those that the bundle does not take are refused by all ranks, which print one error."""
    dims = {"x": {0: dr.Dim("batch", max=8), 1: "length"}}
    plan = dr.compile(Second(), (torch.randn(2, 9, 4),), shardings={"x": "S[0]"}, mesh=3, dynamic_shapes=dims, name="m")
    plan.save(tmp_path / "plan.dist", backends=("torch",))
    x = torch.randn(*shape)
    np.savez(tmp_path / "in.npz", x=x.numpy())
    done = mpirun(3, "-m", "distir_relax", *run_arguments(tmp_path))
    assert done.returncode == (2 if message else 0), done.stderr
    assert done.stderr.count("error:") == bool(message)
    assert message in done.stderr
    if not message:
        agrees(tmp_path, {"output": Second()(x).numpy()}, 1e-5)


def test_a_wrong_world_size(tmp_path: Path) -> None:
    saved(made_once(short_gpt2), 3, "ragged", tmp_path, ("torch",))
    done = mpirun(2, "-m", "distir_relax", *run_arguments(tmp_path))
    assert done.returncode == 2
    assert "3 ranks" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.npz").exists()
