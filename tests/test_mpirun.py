"""Real launches: compiled on disk, run by mpirun on 2, 3 and 5 ranks, by torchrun, and by neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import distir_relax as dr
from tests.runtime.processes import mpirun, python, torchrun
from tests.zoo import Case, gpt2, minilm, mlp, resnet, uneven_unet

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(180)]


def saved(case: Case, ranks: int, tail: str, folder: Path, backends: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Compile for `ranks` in a row; see `saved_on`."""
    return saved_on(dr.DeviceMesh((ranks,), ("tp",)), case, tail, folder, backends)


def saved_on(
    mesh: dr.DeviceMesh, case: Case, tail: str, folder: Path, backends: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Compile into ``plan.dist`` with its inputs in ``in.npz``; what unsharded torch gives."""
    plan = dr.compile(case.model, case.args, case.kwargs, shardings=case.shardings, mesh=mesh, tail=tail)
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
        "--timeout", "60",
    ]  # fmt: skip


def agrees(folder: Path, expected: dict[str, np.ndarray], limit: float) -> None:
    found = np.load(folder / "out.npz")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert np.abs(found[key] - value).max() < limit


@pytest.mark.parametrize(("ranks", "tail"), [(2, "pad"), (3, "ragged"), (5, "pad")])
def test_gpt2_with_torch(ranks: int, tail: str, tmp_path: Path) -> None:
    expected = saved(gpt2(), ranks, tail, tmp_path, ("torch",))
    done = mpirun(ranks, "-m", "distir_relax", *run_arguments(tmp_path))
    assert done.returncode == 0, done.stderr
    agrees(tmp_path, expected, 1e-5)


@pytest.mark.parametrize(("ranks", "tail"), [(2, "ragged"), (3, "pad"), (5, "ragged")])
def test_gpt2_with_tvm(ranks: int, tail: str, tmp_path: Path) -> None:
    expected = saved(gpt2(layers=1), ranks, tail, tmp_path, ("tvm",))
    done = mpirun(ranks, "-m", "distir_relax", *run_arguments(tmp_path, "tvm"))
    assert done.returncode == 0, done.stderr
    agrees(tmp_path, expected, 1e-4)


@pytest.mark.parametrize(
    ("make", "backend", "tail"),
    [(resnet, "torch", "ragged"), (resnet, "tvm", "pad"), (uneven_unet, "torch", "pad")],
)
def test_halos_between_processes(make: Callable[[], Case], backend: str, tail: str, tmp_path: Path) -> None:
    case = make()
    expected = saved(case, 3, tail, tmp_path, (backend,))
    done = mpirun(3, "-m", "distir_relax", *run_arguments(tmp_path, backend))
    assert done.returncode == 0, done.stderr
    agrees(tmp_path, expected, 1e-4)


@pytest.mark.parametrize(("backend", "tail"), [("torch", "ragged"), ("tvm", "pad")])
def test_weights_split_along_both_axes_of_a_grid(backend: str, tail: str, tmp_path: Path) -> None:
    case = mlp(13, 127)
    case.shardings = {"0.weight": "S[0], S[0]"}
    expected = saved_on(dr.DeviceMesh((2, 3), ("a", "b")), case, tail, tmp_path, (backend,))
    done = mpirun(6, "-m", "distir_relax", *run_arguments(tmp_path, backend))
    assert done.returncode == 0, done.stderr
    agrees(tmp_path, expected, 1e-5)


def test_minilm_on_five_ranks(tmp_path: Path) -> None:
    expected = saved(minilm(), 5, "ragged", tmp_path, ("torch",))
    done = mpirun(5, "-m", "distir_relax", *run_arguments(tmp_path), "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    agrees(tmp_path, expected, 1e-5)


def test_the_same_bundle_under_torchrun_and_as_threads(tmp_path: Path) -> None:
    expected = saved(gpt2(layers=1), 2, "ragged", tmp_path, ("torch",))
    for launch in (lambda: torchrun(2, "-m", "distir_relax", *run_arguments(tmp_path)),
                   lambda: python("-m", "distir_relax", *run_arguments(tmp_path))):  # fmt: skip
        done = launch()
        assert done.returncode == 0, done.stderr
        agrees(tmp_path, expected, 1e-5)
        (tmp_path / "out.npz").unlink()


def test_a_wrong_world_size(tmp_path: Path) -> None:
    saved(gpt2(layers=1), 3, "ragged", tmp_path, ("torch",))
    done = mpirun(2, "-m", "distir_relax", *run_arguments(tmp_path))
    assert done.returncode == 2
    assert "3 ranks" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.npz").exists()
