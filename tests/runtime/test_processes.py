"""Real launches: mpirun on 2, 3, 5 and 6 ranks, torchrun on 2, and what happens when a rank fails in one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from handmade import DEADLOCK, RAISES_ON_1, example_input, expected_outputs, mlp_bundle

from distir_relax.bundle import write_bundle
from tests.runtime.processes import mpirun, python, torch_ranks, torchrun

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(120)]
MAIN = Path(__file__).parent / "collectives_main.py"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the input `x.npz`."""
    np.savez(tmp_path / "x.npz", x=example_input())
    return tmp_path


def save(folder: Path, sizes: list[int], text: str | None = None) -> Path:
    bundle = mlp_bundle(sizes) if text is None else mlp_bundle(sizes, text)
    return write_bundle(bundle, folder / "m.dist")


def run_arguments(folder: Path, *more: str) -> list[str]:
    return ["-m", "distir_relax", "run", str(folder / "m.dist"), "--input", str(folder / "x.npz"),
            "--output", str(folder / "y.npz"), *more]  # fmt: skip


def check_answer(folder: Path, sizes: list[int]) -> None:
    found = np.load(folder / "y.npz")
    for name, value in expected_outputs(mlp_bundle(sizes), example_input()).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
        assert found[name].dtype == np.float32


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("n", "mesh"), [(3, "3"), (6, "2x3")], ids=["a row", "a grid"])
def test_every_collective_under_mpirun(n: int, mesh: str) -> None:
    done = mpirun(n, MAIN, mesh, limit=120, fresh=n == 3)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == sorted(["", *(f"rank {r} of {n} (mpi) right" for r in range(n))])


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("n", "without"), [(2, []), (3, []), (2, ["1"])])
def test_sums_in_shared_memory(n: int, without: list[str]) -> None:
    done = mpirun(n, Path(__file__).parent / "shared_sums_main.py", *without, limit=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == sorted(["", *(f"rank {r} right" for r in range(n))])


def test_every_collective_under_torchrun() -> None:
    done = torchrun(2, MAIN, "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(torch) right") == 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("hosts", "mesh"), [((2, 1), "3"), ((3, 1, 2), "2x3"), ((2, 2, 1), "5")])
def test_every_collective_between_hosts(hosts: tuple[int, ...], mesh: str) -> None:
    texts = torch_ranks(hosts, MAIN, mesh, limit=120)
    assert [text.splitlines()[-1] for text in texts] == [
        f"rank {rank} of {sum(hosts)} (torch) right" for rank in range(sum(hosts))
    ]


@pytest.mark.parametrize("sizes", [[3, 2], [3, 0, 2], [1, 2, 0, 4, 1]], ids=str)
def test_a_bundle_under_mpirun(files: Path, sizes: list[int]) -> None:
    save(files, sizes)
    arguments = run_arguments(files, "--report", str(files / "r.json"), "--repeat", "3")
    done = mpirun(len(sizes), *arguments, fresh=sizes == [3, 0, 2])
    assert done.returncode == 0, done.stderr
    check_answer(files, sizes)
    report = json.loads((files / "r.json").read_text())
    assert (report["transport"], report["world_size"], report["steps"]) == ("mpi", len(sizes), 3)
    assert report["step_seconds"] > 0
    n = len(sizes)
    for rank, size in zip(report["ranks"], sizes, strict=True):
        assert rank["weight_bytes"] == size * (6 + 5) * 4
        assert rank["by_kind"] == {"all_reduce": {"calls": 1, "sent_bytes": 2 * (n - 1) * 4 * 5 * 4 // n}}
    assert done.stdout.count("all_reduce (calls)") == 1, "one rank prints the table"


@pytest.mark.sweep
def test_a_bundle_under_torchrun(files: Path) -> None:
    save(files, [3, 2])
    done = torchrun(2, *run_arguments(files), fresh=True)
    assert done.returncode == 0, done.stderr
    check_answer(files, [3, 2])


def test_a_wrong_world_size_is_one_message(files: Path) -> None:
    save(files, [3, 0, 2])
    done = mpirun(2, *run_arguments(files))
    assert done.returncode == 2
    assert done.stderr.count("expected 3 ranks for the mesh (tp=3), found 2") == 1
    assert "Traceback" not in done.stderr
    assert not (files / "y.npz").exists()


def test_ranks_with_unlike_bundles_agree_to_stop(files: Path) -> None:
    write_bundle(mlp_bundle([3, 2]), files / "m0.dist")
    write_bundle(mlp_bundle([3, 2], DEADLOCK), files / "m1.dist")
    program = files / "unlike.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from distir_relax.runtime.launcher_detection import detect\n"
        "import os\n"
        "from distir_relax.cli import main\n"
        "assert detect() == 'mpi'\n"
        f"bundle = Path({str(files)!r}) / f\"m{{os.environ['OMPI_COMM_WORLD_RANK']}}.dist\"\n"
        f"sys.argv = ['distir', 'run', str(bundle), '--input', {str(files / 'x.npz')!r}]\n"
        "main()\n"
    )
    done = mpirun(2, program)
    assert done.returncode == 2
    assert done.stderr.count("the ranks disagree on the bundle: rank 0 has") == 1
    assert "Traceback" not in done.stderr


def test_corrupt_weights_are_noticed_under_mpirun(files: Path) -> None:
    file = save(files, [3, 2]) / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    done = mpirun(2, *run_arguments(files))
    assert done.returncode == 2
    assert done.stderr.count("weights are damaged") == 1
    assert "Traceback" not in done.stderr
    assert not (files / "y.npz").exists()


def test_a_rank_that_raises_ends_the_launch(files: Path) -> None:
    save(files, [3, 0, 2], RAISES_ON_1)
    done = mpirun(3, *run_arguments(files, "--trust-code"), fresh=True)
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert "ValueError: a kernel failed" in done.stderr
    assert [item.name for item in files.iterdir() if "y.npz" in item.name] == []


def test_a_deadlock_ends_the_launch_and_says_where_each_rank_waits(files: Path) -> None:
    save(files, [3, 0, 2], DEADLOCK)
    done = mpirun(3, *run_arguments(files, "--trust-code", "--timeout", "3"))
    assert done.returncode == 75
    assert "a rank has waited for more than 3 s" in done.stderr
    for rank in range(3):
        line = f"rank {rank} waits in step #1 %b = recv(%x) (model.py:3); it last finished step #0 %a = all_reduce"
        assert done.stderr.count(line) == 1
    assert not (files / "y.npz").exists()


@pytest.mark.sweep
def test_a_deadlock_under_torchrun(files: Path) -> None:
    save(files, [3, 2], DEADLOCK)
    done = torchrun(2, *run_arguments(files, "--trust-code", "--timeout", "3"))
    assert done.returncode != 0
    for rank in range(2):
        assert done.stderr.count(f"rank {rank} waits in step #1 %b = recv(%x) (model.py:3)") == 1


def test_a_rank_starts_without_the_compiler_and_tvm(files: Path) -> None:
    save(files, [3, 2])
    program = files / "quick.py"
    program.write_text(
        "import sys\n"
        "from distir_relax.cli import app\n"
        f"app({run_arguments(files)[2:]!r}, standalone_mode=False)\n"
        # It has what generates code of a program's text.
        "heavy = ('tvm', 'onnx', 'transformers', 'distir_relax.sharding', 'distir_relax.lowering.to_distir',\n"
        "         'distir_relax.frontends', 'distir_relax.interpret', 'distir_relax.simulation')\n"
        "print('imported', [name for name in heavy if name in sys.modules])\n"
    )
    done = python(program, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "imported []" in done.stdout
    check_answer(files, [3, 2])
