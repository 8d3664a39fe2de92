"""Sessions that are interrupted, called from several threads, or that fail: the next answer is right, or none."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade import DEADLOCK, RAISES_ON_1, SUM_COLUMNS, example_input, expected_outputs, mlp_bundle

import distir_relax as dr
from distir_relax import annotate_sharding
from distir_relax.errors import RunError
from distir_relax.runtime.session import Session
from tests.runtime.counting import Counting
from tests.runtime.processes import python

pytestmark = pytest.mark.timeout(60)


def test_interrupts_at_any_moment_leave_the_next_answers_right() -> None:
    done = python(Path(__file__).parent / "interrupted_main.py")
    assert done.returncode == 0, done.stderr
    assert "runs interrupted, every answer right" in done.stdout
    assert "this session is closed: a rank did not return from the previous run" in done.stdout


def test_calls_from_several_threads_take_turns() -> None:
    session = Session(mlp_bundle([1, 2, 2]))
    wrong: list[object] = []

    def caller(seed: int) -> None:
        for turn in range(20):
            x = np.random.default_rng(100 * seed + turn).standard_normal((4, 6)).astype("float32")
            found = session({"x": x})
            if not np.allclose(found["z"].numpy(), expected_outputs(session.bundle, x)["z"], rtol=1e-5, atol=1e-5):
                wrong.append((seed, turn))

    callers = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in range(3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ annotate_sharding(self.weight, dr.DeviceMesh((3,), ("tp",)), "S[0]")


def test_a_plan_goes_on_after_an_interrupt_and_takes_a_timeout() -> None:
    model, x = Product(), torch.randn(5, 7)
    plan = dr.compile(model, (x,))
    expected = model(x)
    torch.testing.assert_close(plan(x), expected)
    _close(plan)
    torch.testing.assert_close(plan(x, timeout=5), expected)
    torch.testing.assert_close(dr.compile(model, (x,))(x, timeout=0), expected)


def _close(plan: dr.Plan) -> None:
    plan._sessions.of("torch")._closed = "a rank did not return from the previous run"


def test_a_time_out_for_one_call() -> None:
    session = Session(mlp_bundle([1, 1, 1], DEADLOCK))
    start = time.monotonic()
    with pytest.raises(RunError, match=r"waited for more than 0\.3 s"):
        session({"x": example_input()}, timeout=0.3)
    assert time.monotonic() - start < 5


def test_state_that_a_failed_run_has_torn_is_not_used() -> None:
    model, x = Counting(), torch.randn(3, 7)
    plan = dr.compile(model, (x,))
    torch.testing.assert_close(plan(x), model(x))
    session: Any = plan._sessions.of("torch")
    failing = lambda *inputs, sizes: 1 / 0  # noqa: E731
    failing.steps = ()  # type: ignore[attr-defined]
    session._programs[2] = failing
    with pytest.raises(ZeroDivisionError):
        plan(x)
    with pytest.raises(RunError, match="the state is lost: its last run failed"):
        plan(x)


def test_the_rank_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="a kernel failed") as caught:
        Session(mlp_bundle([2, 1, 2], RAISES_ON_1))({"x": example_input()})
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    text = SUM_COLUMNS.replace(
        "    z =", "    from distir_relax.errors import RunError\n    if comm.rank == 2: raise RunError('no')\n    z ="
    )
    with pytest.raises(RunError, match=r"no \(on rank 2 of 3\)"):
        Session(mlp_bundle([2, 1, 2], text))({"x": example_input()})
