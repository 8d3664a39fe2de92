"""Launcher detection: which launcher started this process, and whether it connected the tasks that it started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.errors import RunError

Environment = Mapping[str, str]

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
AGENT = "TORCHELASTIC_RUN_ID"
"""The variable that torchrun, and agents, set for the ranks that they start: it is the innermost launcher then.

Other variables are those of the launcher that has started it, such as srun, which sets PMIX_RANK for all programs.
"""
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
# SLURM ids of steps that are shells: the batch script, the interactive step of salloc, the external step.
_SHELL_STEPS = {str(2**32 - n) for n in (4, 5, 6)}
# Variables by which Kubernetes jobs commonly pass the number of pods to containers.
_POD_COUNTS = ("WORLD_SIZE", "NNODES", "PET_NNODES", "JOB_PARALLELISM", "JOB_COMPLETIONS", "VC_WORKER_NUM")


def detect(environment: Environment = os.environ) -> str | None:
    """Return the kind of launcher: "mpi" (mpirun, srun with PMI), "torch" (torchrun), or None for neither."""
    if AGENT not in environment and any(name in environment for name in _MPI):
        return "mpi"
    if all(name in environment for name in _TORCH):
        return "torch"
    return None


def check_connected(environment: Environment = os.environ) -> None:
    """Raise RunError if a launcher started several tasks without a connection between them.

    Each of them would run all ranks as threads, and write the same files.
    """
    if detect(environment) is not None:
        return
    for launcher in _LAUNCHERS:
        launch = launcher(environment)
        if launch is not None:
            raise RunError(
                f"{launch.name} started {launch.tasks} without a connection between them: each would run all ranks",
                launch.variables, launch.remedy,
            )  # fmt: skip


def launch_size(environment: Environment = os.environ) -> int | None:
    """Return the launcher's number of ranks, None if it is not set."""
    return _first_number(environment, ("WORLD_SIZE",) if AGENT in environment else _SIZES)


def local_size(environment: Environment = os.environ) -> int | None:
    """Return the launcher's number of ranks on this node, None if it is not set."""
    return _first_number(environment, ("LOCAL_WORLD_SIZE",) if AGENT in environment else _LOCAL_SIZES)


def check_alone(environment: Environment = os.environ) -> None:
    """Raise RunError in a process that is already a rank or a task: a command that starts ranks runs once."""
    if detect(environment) is not None:
        raise RunError(
            "this command starts the ranks itself, but this process is a rank of a launch already",
            hint="start it without mpirun, srun or torchrun, or run `distir run` under them",
        )
    check_connected(environment)


@dataclass(frozen=True)
class _Unconnected:
    """A launch whose tasks are not connected."""

    name: str
    tasks: str
    variables: str
    remedy: str


def _slurm(environment: Environment) -> _Unconnected | None:
    """Detect a step of several tasks. A batch script has a job and SLURM_PROCID=0, but no step of its own."""
    rank = _number(environment, "SLURM_PROCID")
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID"))
    if rank is None or step in _SHELL_STEPS or (step is None and rank == 0 and "SLURM_JOB_ID" in environment):
        return None
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS") or rank + 1
    if tasks < 2:
        return None
    return _Unconnected(
        "srun", f"{tasks} tasks", _named(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        f"srun --mpi=pmix -n {tasks} distir run ... connects them (srun --mpi=list has the kinds of this cluster); "
        f"without PMI, mpirun -n {tasks} distir run ... in the batch script, or torchrun in one task per node",
    )  # fmt: skip


def _pals(environment: Environment) -> _Unconnected | None:
    """Detect PALS tasks. It does not set the total number of ranks, so any rank is assumed to be one of several."""
    rank, here = _number(environment, "PALS_RANKID"), _number(environment, "PALS_LOCAL_SIZE")
    if rank is None:
        return None
    tasks = f"{here} tasks on this node" if here else "tasks"
    return _Unconnected(
        "mpiexec of PALS", tasks, _named(environment, "PALS_RANKID", "PALS_LOCAL_SIZE"),
        "mpiexec --pmi=pmix -n N distir run ..., with mpi4py built for the MPI of this machine; "
        "to run all ranks in one process, leave mpiexec out",
    )  # fmt: skip


def _ranks_by_number(
    environment: Environment, name: str, rank_name: str, size_name: str, remedy: str
) -> _Unconnected | None:
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank is None or (size is not None and size < 2) or (size is None and rank == 0):
        return None
    tasks = f"{size} tasks" if size is not None else "several tasks"
    return _Unconnected(name, tasks, _named(environment, rank_name, size_name), remedy)


def _jsrun(environment: Environment) -> _Unconnected | None:
    remedy = "jsrun -n N distir run ... with its MPI enabled (no --smpiargs=off), or mpirun -n N distir run ..."
    return _ranks_by_number(environment, "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", remedy)


def _flux(environment: Environment) -> _Unconnected | None:
    remedy = "flux run -o pmi=simple,pmix -n N distir run ... connects them"
    return _ranks_by_number(environment, "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", remedy)


def _alps(environment: Environment) -> _Unconnected | None:
    remedy = "start the ranks with mpiexec or srun of the MPI that mpi4py was built for"
    return _ranks_by_number(environment, "aprun", "ALPS_APP_PE", "ALPS_APP_SIZE", remedy)


def _torch_incomplete(environment: Environment) -> _Unconnected | None:
    size = _number(environment, "WORLD_SIZE") or 0
    if size < 2 or "RANK" not in environment:
        return None
    return _Unconnected(
        "a launcher", f"{size} tasks", _named(environment, "RANK", "WORLD_SIZE"),
        "torchrun sets MASTER_ADDR and MASTER_PORT too: set them to the host and a free port of rank 0",
    )  # fmt: skip


def _kubernetes(environment: Environment) -> _Unconnected | None:
    """Detect pods of an indexed job. An index alone may be that of independent work."""
    index = _number(environment, "JOB_COMPLETION_INDEX")
    counts = {name: count for name in _POD_COUNTS if (count := _number(environment, name)) is not None and count > 1}
    if index is None or not counts:
        return None
    pods = max(counts.values())
    return _Unconnected(
        "a Kubernetes job", f"{pods} pods", _named(environment, "JOB_COMPLETION_INDEX", *counts),
        f"in each pod: torchrun --nnodes {pods} --node-rank $JOB_COMPLETION_INDEX --nproc-per-node 1 --master-addr "
        "HOST-OF-POD-0 --no-python distir run ...; a headless service gives pod 0 a name",
    )  # fmt: skip


_LAUNCHERS = (_slurm, _pals, _jsrun, _flux, _alps, _kubernetes, _torch_incomplete)


def _number(environment: Environment, name: str) -> int | None:
    value = environment.get(name, "").strip()
    return int(value) if value.isascii() and value.isdecimal() else None


def _first_number(environment: Environment, names: Sequence[str]) -> int | None:
    return next((number for name in names if (number := _number(environment, name)) is not None), None)


def _named(environment: Environment, *names: str) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
