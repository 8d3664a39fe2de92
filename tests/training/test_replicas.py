"""Replicas of the state are compared, and the first element that differs is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import local_intervals, read_bundle
from distir_relax.errors import LostError, RunError
from distir_relax.runtime import replicas
from distir_relax.runtime.replicas import difference, digest, replicas_of
from distir_relax.runtime.session import Session
from distir_relax.runtime.state import changing
from tests.runtime.processes import mpirun
from tests.training import data, perceptron

STRATEGIES = ["3/1/1/1", "1/2/1/1", "2/3/1/1", "2/1/2/2", "1/1/1/1"]
CORRUPT = Path(__file__).with_name("corrupt.py")


def alone(value: Any) -> list[Any]:
    """The exchange of a process that has all ranks."""
    return [value]


def elements(tensor: Any, mesh: Any, rank: int) -> list[tuple[int, ...]]:
    """The global indices that a rank holds, in the order of its shard."""
    if not tensor.is_on(rank):
        return []
    dims = [[i for start, stop in pieces for i in range(start, stop)] for pieces in local_intervals(tensor, mesh, rank)]
    return list(itertools.product(*dims))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_changed_replica_is_named_by_rank_tensor_and_index(strategy: str, tmp_path: Path) -> None:
    """Against the lists of the indices that each rank holds: one that others hold, too, is found if it changes."""
    session = Session(read_bundle(perceptron.saved(strategy, tmp_path)))
    manifest, mesh = session.bundle.manifest, session.bundle.manifest.mesh
    assert difference(session, alone, 0) is None
    found = 0
    for tensor in changing(manifest):
        held = [elements(tensor, mesh, rank) for rank in range(mesh.size)]
        for rank in range(mesh.size):
            shares = [other for other in range(mesh.size) if other != rank and held[rank] and held[other] == held[rank]]
            flat = session.programs[rank].state[tensor.name].view(-1) if held[rank] else torch.zeros(0)
            # The first, the last and one between: all differ in the same step, and the first of them is named.
            for at in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
                kept = flat[at:].clone()
                flat[at:] += 1
                error = difference(session, alone, 7)
                flat[at:] = kept
                if not shares:
                    assert error is None
                    continue
                found += 1
                assert isinstance(error, LostError)
                assert error.where == tensor.name
                assert "replicas differ after step 7: " in error.message
                assert f"[{', '.join(map(str, held[rank][at]))}]" in error.message
                assert f"rank {rank} on " in error.message
                if len(shares) > 1:
                    assert f", {len(shares)} others have {kept[0].item()}" in error.message
                else:
                    assert f"rank {shares[0]} on " in error.message
    assert bool(found) == (strategy != "1/1/1/1") == bool(replicas_of(manifest))
    assert difference(session, alone, 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 127, (1 << 18) - 1, (1 << 18) + 5])
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    assert digest(torch.cat([tensor[:1], tensor])[1:]) == expected, "of another alignment"
    bits = tensor.view(torch.uint8)
    for byte in {0, len(bits) // 3, len(bits) // 2, len(bits) - 1}:
        for bit in (0, 7):
            bits[byte] ^= 1 << bit
            assert digest(tensor) != expected
            bits[byte] ^= 1 << bit
    assert digest(tensor) == expected


def test_changes_that_a_sum_misses_change_the_digest() -> None:
    tensor = torch.randn(3 << 15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = digest(tensor)
    swapped, moved, opposite = tensor.clone(), tensor.roll(1 << 15), tensor.clone()
    swapped[[3, 70000]] = swapped[[70000, 3]]
    opposite.view(torch.int64)[5] += 1
    opposite.view(torch.int64)[6] -= 1
    zeros = torch.zeros(1 << 15)
    found = {digest(t) for t in (swapped, moved, opposite)} | {digest(zeros), digest(-zeros)}
    assert len(found | {expected}) == 6


def test_a_run_compares_as_often_as_it_says_and_before_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real: Callable[..., Any] = replicas.difference

    def counted(session: Session, exchange: Any, step: int, hint: str = "") -> Any:
        steps.append(step)
        return real(session, exchange, step, hint)

    monkeypatch.setattr("distir_relax.runtime.training.executor.difference", counted)
    path = perceptron.saved("3/1/1/1", tmp_path)
    dr.train(path, data.batches, steps=11, checkpoint=tmp_path / "run", every=4, verify_replicas=3)
    assert steps == [3, 4, 6, 8, 9, 11]
    steps.clear()
    dr.train(path, data.batches, steps=11, checkpoint=tmp_path / "other", every=4)
    assert steps == []
    with pytest.raises(RunError, match="expected 0 or more steps, found -1"):
        dr.train(path, data.batches, steps=1, verify_replicas=-1)


@pytest.mark.mpirun
@pytest.mark.parametrize("strategy", ["3/1/1/1"])
def test_a_launch_ends_with_its_name_and_leaves_the_checkpoint_before(strategy: str, tmp_path: Path) -> None:
    path = perceptron.saved(strategy, tmp_path)
    run = ("train", path, "--data", f"{data.__file__}:batches", "--steps", 9, "--checkpoint", tmp_path / "run")
    done = mpirun(3, CORRUPT, *run, "--every", 2, "--verify-replicas", 1)
    assert done.returncode == 75, done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1
    assert "down.weight: replicas differ after step 5: rank 1 on " in done.stderr
    assert " at [2, 4], 2 others have " in done.stderr
    assert "go on from the checkpoint of step 4 with --resume last" in done.stderr
    done = mpirun(3, "-m", "distir_relax", *run, "--every", 2, "--verify-replicas", 1, "--resume", "last")
    assert done.returncode == 0, done.stderr
