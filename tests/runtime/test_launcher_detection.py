"""Which launcher started a process, and launchers that start tasks without a connection between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import mlp_bundle

from distir_relax.bundle import write_bundle
from distir_relax.errors import RunError
from distir_relax.runtime.join import join_world
from distir_relax.runtime.launch import launch
from distir_relax.runtime.launcher_detection import check_alone, check_connected, detect, launch_size, local_size
from distir_relax.runtime.local_ranks import rank_in
from tests.runtime.processes import interpreter, start

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        (TORCH, "torch"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": "2", **TORCH}, "mpi"),
        # srun, where MpiDefault is pmix, sets PMIX_RANK for torchrun too, whose ranks inherit it.
        ({**STEP, "PMIX_RANK": "1", **TORCH, "TORCHELASTIC_RUN_ID": "7"}, "torch"),
        (STEP, None),
        ({**STEP, "PMIX_RANK": "1"}, "mpi"),
    ],
)
def test_the_launcher_is_detected(environment: dict[str, str], expected: str | None) -> None:
    assert detect(environment) == expected


@pytest.mark.parametrize(
    ("environment", "tasks", "command"),
    [
        (STEP, "srun started 3 tasks", "srun --mpi=pmix -n 3 distir run"),
        # What a container lets through of a step's environment.
        ({"SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, "srun started 3 tasks", "srun --mpi=pmix -n 3 distir run"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "5", "SLURM_PROCID": "4"}, "srun started 5 tasks", "mpirun -n 5"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "4"}, "PALS started 4 tasks on this node", "mpiexec --pmi=pmix"),
        ({"PALS_RANKID": "0"}, "PALS started tasks", "mpiexec --pmi=pmix"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "jsrun started 6 tasks", "jsrun -n N"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "flux started 2 tasks", "flux run -o pmi"),
        ({"ALPS_APP_PE": "3"}, "aprun started several tasks", "mpiexec or srun"),
        (
            {"JOB_COMPLETION_INDEX": "0", "JOB_PARALLELISM": "3"},
            "Kubernetes job started 3 pods",
            "torchrun --nnodes 3 --node-rank $JOB_COMPLETION_INDEX",
        ),
        ({"RANK": "1", "WORLD_SIZE": "3"}, "a launcher started 3 tasks", "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_tasks_without_a_connection_are_refused(environment: dict[str, str], tasks: str, command: str) -> None:
    with pytest.raises(RunError) as refused:
        check_connected(environment)
    assert tasks in refused.value.message
    assert "without a connection between them" in refused.value.message
    assert command in refused.value.hint
    assert all(f"{name}={value}" in refused.value.where for name, value in environment.items() if "RANK" in name)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A batch script of an allocation for 3 tasks, with and without the id that some versions give its step.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
        # The shell of salloc, on the login node and as an interactive step.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        # srun -n 1 in an allocation for 3.
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "3"},
        {**STEP, "PMIX_RANK": "1"},
        {**STEP, **TORCH},
        {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},
        {"ALPS_APP_PE": "0"},
        # Pods that work on their own.
        {"JOB_COMPLETION_INDEX": "2"},
        {"JOB_COMPLETION_INDEX": "0", "JOB_PARALLELISM": "1"},
        {"WORLD_SIZE": "3"},
        {"SLURM_PROCID": "many", "SLURM_NTASKS": "3"},
    ],
)
def test_one_task_or_connected_ones_go_on(environment: dict[str, str]) -> None:
    check_connected(environment)


def test_the_number_of_ranks_that_a_launcher_started() -> None:
    assert launch_size({}) is None
    assert launch_size({"PMI_SIZE": "3"}) == 3
    assert launch_size({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "5"}) == 5
    assert launch_size({**TORCH, "WORLD_SIZE": "7"}) == 7


def test_the_innermost_launcher_counts_the_ranks() -> None:
    inside = {
        **STEP,
        "PMIX_RANK": "1",
        **TORCH,
        "LOCAL_WORLD_SIZE": "2",
        "PMI_LOCAL_SIZE": "5",
        "TORCHELASTIC_RUN_ID": "7",
    }
    assert (launch_size(inside), local_size(inside), rank_in(inside)) == (2, 2, 0)


def test_a_command_that_starts_ranks_is_no_rank_itself() -> None:
    check_alone({})
    with pytest.raises(RunError, match="is a rank of a launch already"):
        check_alone({"OMPI_COMM_WORLD_SIZE": "3"})
    with pytest.raises(RunError, match="srun started 3 tasks"):
        check_alone(STEP)


def test_joining_and_launching_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="srun started 3 tasks"):
        join_world()
    with pytest.raises(RunError, match="srun started 3 tasks"):
        launch(3, ["run"])


@pytest.mark.mpirun
def test_an_mpi_that_cannot_use_the_launchers_pmi(tmp_path: Path) -> None:
    write_bundle(mlp_bundle([3, 0, 2]), tmp_path / "m.dist")
    # As srun --mpi=pmi2 starts ranks: Open MPI knows PMIx alone, and each rank is a world of its own.
    done = start([*interpreter(), "-m", "distir_relax", "run", str(tmp_path / "m.dist")], PMI_SIZE="3", PMI_RANK="1")
    assert done.returncode == 2, done.stderr
    assert "the launcher started 3 ranks, but MPI joined 1: mpi4py uses Open MPI" in done.stderr
    assert "hint: start them with the mpirun of that MPI" in done.stderr


def test_doctor_reports_tasks_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    from distir_relax.runtime import doctor

    assert doctor._launcher().ok
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = doctor._launcher()
    assert (found.ok, found.essential) == (False, True)
    assert "srun started 3 tasks" in found.detail
    assert "srun --mpi=pmix -n 3" in found.fix
