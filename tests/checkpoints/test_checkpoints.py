"""Checkpoints: pieces where they belong, whole or not at all, read by other ranks under another strategy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import distir_relax as dr
from distir_relax.bundle import Tensor
from distir_relax.checkpoints import STATE_FILE, Position, StateFile, latest, saved_steps
from distir_relax.checkpoints.state_file import runs
from distir_relax.errors import CheckpointError
from distir_relax.optimizers import Optimize
from distir_relax.runtime.session import Session
from distir_relax.runtime.training.checkpointing import resume, save
from distir_relax.runtime.training.executor import Executor
from distir_relax.support.learning_rate import RATE
from tests.optimizers.steps import Perceptron, batches, training_plan


@pytest.mark.parametrize(
    "intervals",
    [
        [[(0, 5)], [(0, 7)], [(0, 3)]],
        [[(1, 2), (3, 5)], [(0, 7)], [(0, 3)]],
        [[(0, 5)], [(2, 2), (4, 7)], [(0, 3)]],
        [[(0, 1), (4, 5)], [(6, 7)], [(0, 1), (2, 3)]],
        [[], [(0, 7)], [(0, 3)]],
        [[(0, 5)], [(0, 7)], []],
    ],
    ids=str,
)
def test_runs_are_the_bytes_of_a_piece_in_its_order(intervals: list[list[tuple[int, int]]]) -> None:
    whole = np.arange(5 * 7 * 3).reshape(5, 7, 3)
    index = [[i for a, b in pieces for i in range(a, b)] for pieces in intervals]
    expected = whole[np.ix_(*index)].reshape(-1).tolist() if all(index) else []
    found = [i for start, length in runs(whole.shape, intervals, 1) for i in range(start, start + length)]
    assert found == expected
    assert [2 * start for start, _ in runs(whole.shape, intervals, 1)] == [
        s for s, _ in runs(whole.shape, intervals, 2)
    ]


def test_a_file_of_every_dtype_is_read_by_safetensors(tmp_path: Path) -> None:
    values = {
        "flags": torch.tensor([True, False, True]), "none": torch.zeros(0, 3), "step": torch.tensor(7),
        "half": torch.randn(3, 5).bfloat16(), "wide": torch.randn(7, 2, dtype=torch.float64),
    }  # fmt: skip
    tensors = [Tensor(n, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for n, v in values.items()]
    with StateFile(tmp_path / STATE_FILE, tensors, make=True) as file:
        for name, value in values.items():
            if name != "wide":
                file.write(name, [[(0, n)] for n in value.shape], value)
        file.write("wide", [[(0, 2), (6, 7)], [(0, 2)]], values["wide"][[0, 1, 6]])
    with StateFile(tmp_path / STATE_FILE, tensors) as file:
        file.write("wide", [[(2, 6)], [(1, 2)]], values["wide"][2:6, 1:])
        file.write("wide", [[(2, 6)], [(0, 1)]], values["wide"][2:6, :1])
    found = load_file(tmp_path / STATE_FILE)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def executor_of(ranks: int, shardings: dict[str, str], optimizer: object = None) -> tuple[Executor, Session]:
    """A model in training on so many ranks."""
    torch.manual_seed(5)
    step = Optimize(optimizer or dr.optim.AdamW(2.0**-5))
    plan = training_plan(Perceptron(), batches(1)[0], step, shardings=shardings, mesh=ranks)
    session = Session(plan.bundle(("torch",)))
    return Executor(session), session


def losses(session: Session, first: int, last: int) -> list[float]:
    """Run these steps."""
    rate = {RATE: torch.tensor(2.0**-5, dtype=torch.float64)}
    names = [tensor.name for tensor in session.bundle.manifest.inputs]
    return [
        float(session({**dict(zip(names, args, strict=False)), **rate}, outputs=("output",))["output"])
        for args in batches(last)[first:]
    ]


def position(step: int) -> Position:
    return Position(step, 11 * step, 3, "perceptron", {"kind": "Constant", "lr": 0.1})


def test_state_of_one_element_that_is_expanded_zeros_is_written(tmp_path: Path) -> None:
    """Initial state is that: of 3 elements on 3 ranks, before and after a step."""
    step = dr.compile_training(
        torch.nn.Linear(5, 3), torch.nn.functional.mse_loss, optimizer=dr.optim.SGD(0.1, momentum=0.9),
        example_batch=(torch.randn(7, 5), torch.randn(7, 3)), strategy="3/1/1/1,zero=1",
    )  # fmt: skip
    dr.train(step, [(torch.randn(7, 5), torch.randn(7, 3))], steps=1, checkpoint=tmp_path)
    saved = load_file(tmp_path / "step-00000001" / "state.safetensors")
    torch.testing.assert_close(saved["bias.momentum_buffer"], step.plan.session().state()["bias.momentum_buffer"])


def test_a_run_goes_on_under_another_strategy_on_other_ranks(tmp_path: Path) -> None:
    executor, session = executor_of(3, {"up.weight": "S[0]", "down.weight": "S[1]"})
    assert executor.bundle.manifest.weights
    before = losses(session, 0, 3)
    path = save(executor, tmp_path / "ck", position(3), keep=2)
    assert path == tmp_path / "ck" / "step-00000003"
    written = load_file(path / STATE_FILE)
    for name, value in session.state().items():
        torch.testing.assert_close(written[name], value, rtol=0, atol=0)
    after = losses(session, 3, 6)
    other, elsewhere = executor_of(5, {"x": "S[0]", "target": "S[0]"})
    saved = resume(other, tmp_path / "ck")
    assert saved.position == position(3)
    assert losses(elsewhere, 3, 6) == pytest.approx(after, rel=1e-12)
    assert after != pytest.approx(before)


def test_the_last_ones_are_kept_and_a_folder_of_one_can_be_named(tmp_path: Path) -> None:
    executor, _ = executor_of(2, {"up.weight": "S[0]"})
    for step in (1, 2, 30, 30):
        save(executor, tmp_path, position(step), keep=2)
    assert saved_steps(tmp_path) == [2, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000030"]
    assert latest(tmp_path).position.step == 30
    assert latest(tmp_path / "step-00000002").position.step == 2
    (tmp_path / "latest").write_text("step-00000001\n")
    assert latest(tmp_path).position.step == 30


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync"])
def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    executor, _ = executor_of(3, {"up.weight": "S[0]"})
    save(executor, tmp_path, position(1), keep=2)
    real, calls = getattr(os, call), []

    def full(*args: object) -> object:
        calls.append(args)
        if len(calls) > (9 if call == "pwrite" else 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            save(executor, tmp_path, position(2), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    resume(executor, tmp_path)
    # What a run that was killed has left half-written is removed by the next.
    (tmp_path / ".step-00000002.abcd").mkdir()
    (tmp_path / ".latest.abcd").write_text("step-00000002\n")
    save(executor, tmp_path, position(2), keep=2)
    assert saved_steps(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    executor, _ = executor_of(2, {"up.weight": "S[0]"}, dr.optim.SGD())
    save(executor, tmp_path, position(4), keep=1)
    other, session = executor_of(2, {"up.weight": "S[0]"})
    begin = session.state()
    with pytest.raises(CheckpointError, match=r"lacks optimizer\.step, up\.weight\.exp_avg, .* and \d+ more") as caught:
        resume(other, tmp_path)
    assert "step-00000004" in caught.value.where
    for name, value in session.state().items():
        torch.testing.assert_close(value, begin[name], rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="no such folder"):
        resume(other, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        resume(other, tmp_path / "empty")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    executor, _ = executor_of(2, {"up.weight": "S[0]"}, dr.optim.SGD())
    path = save(executor, tmp_path, position(4), keep=1)
    assert path is not None
    content = (path / STATE_FILE).read_bytes()
    (path / STATE_FILE).write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match="damaged or half-written"):
        resume(executor, tmp_path)
    (path / "position.json").write_text('{"format": 4}')
    with pytest.raises(CheckpointError, match="format 4"):
        resume(executor, tmp_path)
