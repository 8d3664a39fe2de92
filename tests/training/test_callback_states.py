"""States of callbacks in checkpoints: a run that is interrupted often ends where one that is not does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.checkpoints import latest
from distir_relax.cli.app import app
from distir_relax.errors import RunError
from tests.training import data, observers, perceptron

Stopping = dr.callbacks.EarlyStopping


def still(**options: Any) -> dr.TrainingStep:
    """A step that does not change its weights."""
    torch.manual_seed(0)
    return dr.compile_training(
        torch.nn.Linear(5, 3), mse_loss, optimizer=dr.optim.SGD(0.0), example_batch=data.drawn(0), strategy="2/1/1/1",
        metrics={}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("evaluates", [False, True])
def test_early_stopping_counts_over_interruptions(evaluates: bool, tmp_path: Path) -> None:
    """Preempted after each step, the run ends after the first value and three that are not better."""
    options: dict[str, Any] = {"evaluation": data.held_out, "evaluate_every": 1} if evaluates else {}
    batches = [data.drawn(0)]
    whole = dr.train(still(), batches, steps=20, callbacks=[Stopping(patience=3)], **options)
    assert whole.step == 4
    for steps in range(1, 9):
        ended = dr.train(
            still(),
            batches,
            steps=steps,
            checkpoint=tmp_path,
            resume="auto",
            callbacks=[Stopping(patience=3)],
            **options,
        )
        assert ended.step == steps
        if ended.reason:
            break
    assert (ended.step, ended.reason) == (4, whole.reason)
    # With more patience it goes on.
    more = dr.train(
        still(), batches, steps=20, checkpoint=tmp_path, resume="last", callbacks=[Stopping(patience=6)], **options
    )
    assert more.step == 7


def test_states_are_those_of_the_checkpoint_that_is_resumed(tmp_path: Path) -> None:
    """Two callbacks of a class have their own states, in their order."""
    first, second = observers.Counter(), observers.Counter()
    dr.train(perceptron.step("1/1/1/1"), data.batches, steps=2, checkpoint=tmp_path, every=1, callbacks=[first])
    options: dict[str, Any] = {"checkpoint": tmp_path, "every": 1, "resume": "last"}
    late = observers.Counter()
    dr.train(perceptron.step("1/1/1/1"), data.batches, steps=3, callbacks=[second, late], **options)
    assert (second.seen, late.seen) == (3, 1)
    assert [*latest(tmp_path).position.callbacks] == [{"name": "Counter", "state": {"seen": n}} for n in (3, 1)]
    (tmp_path / "latest").write_text("step-00000002\n")
    with pytest.warns(UserWarning, match="has the state of a callback Counter, which the run does not have"):
        dr.train(perceptron.step("1/1/1/1"), data.batches, steps=3, callbacks=[Stopping(patience=9)], **options)
    with pytest.warns(UserWarning, match="begins anew: it observed loss:min of steps, now loss:max of steps"):
        dr.train(perceptron.step("1/1/1/1"), data.batches, steps=4, callbacks=[Stopping(mode="max")], **options)


def test_callbacks_of_the_command_line_have_states(tmp_path: Path) -> None:
    path = perceptron.saved("2/1/1/1", tmp_path)
    command = ["train", str(path), "--data", f"{data.__file__}:batches", "--checkpoint", str(tmp_path / "ck")]
    command += ["--resume", "auto", "--callbacks", f"{observers.__file__}:counting", "--steps"]
    for steps, last in ((3, 3), (9, 4), (9, 5)):
        done = CliRunner().invoke(app, [*command, str(steps)])
        assert done.exit_code == 0, done.output
        assert f"trained to step {last} of {steps}" in done.output
    assert "five steps were seen" in done.output


class Wrong(dr.Callback):
    """A callback whose state cannot be kept, or be taken back."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LookupError(f"what is {state}?")


@pytest.mark.parametrize("state", [torch.zeros(3), float("nan"), object()])
def test_a_state_that_is_not_json_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a state of JSON's types") as caught:
        dr.train(still(), data.batches, steps=1, checkpoint=tmp_path, callbacks=[Wrong(state)])
    assert caught.value.where == "Wrong.state_dict"


def test_an_error_of_a_state_reaches_the_user(tmp_path: Path) -> None:
    dr.train(still(), data.batches, steps=1, checkpoint=tmp_path, callbacks=[Wrong(1)])
    with pytest.raises(LookupError, match="what is"):
        dr.train(still(), data.batches, steps=2, checkpoint=tmp_path, resume="last", callbacks=[Wrong(1)])
    position = latest(tmp_path).path / "position.json"
    position.write_text(position.read_text().replace('"Wrong"', '"EarlyStopping"'))
    with pytest.raises(RunError, match=r"expected metric, best and count, found \{'state': 1\}"):
        dr.train(still(), data.batches, steps=2, checkpoint=tmp_path, resume="last", callbacks=[Stopping()])
