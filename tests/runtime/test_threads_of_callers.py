"""Several threads of a process that compile models and call plans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handmade import DEADLOCK, example_input, expected_outputs, mlp_bundle
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.errors import RunError
from distir_relax.runtime import session_cache
from distir_relax.runtime.session import Session
from distir_relax.runtime.session_cache import Sessions

pytestmark = pytest.mark.timeout(120)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(0)` to `work(count - 1)`, each in a thread of its own; an exception is a result."""
    results: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except Exception as error:  # whatever the work raises
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x @ self.weight + self.calls


def test_state_is_not_lost_when_calls_meet() -> None:
    model = Counter()
    x = torch.randn(7, 5)
    plan = dr.compile(model, (x,), strategy="1/3/1/1")
    base = x @ model.weight.detach()
    found = at_once(10, lambda number: [plan(x) for _ in range(4)])
    assert not [r for r in found if isinstance(r, Exception)]
    # Each call has added 1 once.
    calls = sorted(round(float((y - base).mean())) for results in found for y in results)
    assert calls == list(range(1, 41))


def test_calls_that_meet_share_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(Session):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(session_cache, "Session", Counted)
    bundle, x = mlp_bundle([2, 0, 3]), example_input()
    kept = Sessions(lambda backend: bundle)
    found = at_once(8, lambda number: [kept.run({"x": x}, "torch", None)["z"] for _ in range(5)])
    assert not [r for r in found if isinstance(r, Exception)]
    expected = torch.from_numpy(expected_outputs(bundle, x)["z"]).float()
    for results in found:
        for z in results:
            torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    assert len(made) == 1


def test_a_session_is_open_while_it_runs_and_after_a_failure_another_takes_its_place() -> None:
    session = Session(mlp_bundle([1, 1], DEADLOCK))

    def fail() -> None:
        with pytest.raises(RunError):
            session({"x": example_input()}, timeout=1.0)

    thread = threading.Thread(target=fail)
    thread.start()
    end = time.monotonic() + 5
    while not session._exclusive.locked() and time.monotonic() < end:
        time.sleep(0.001)
    assert session._closed
    assert not session.closed
    thread.join()
    assert not session.closed
    kept = Sessions(lambda backend: mlp_bundle([1, 1]))
    first = kept.of("torch")
    first._closed = "a rank did not return from the previous run"
    assert kept.run({"x": example_input()}, "torch", None).keys() == {"z", "h"}
    assert kept.of("torch") is not first


def test_models_are_compiled_at_once() -> None:
    def work(number: int) -> float:
        torch.manual_seed(number)
        width = 5 + number
        model = nn.Sequential(nn.Linear(width, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, width))
        x = torch.randn(6, width)
        plan = dr.compile(model, (x,), strategy="1/3/1/1", verify=True)
        step = dr.compile_training(
            model, F.mse_loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=(x, x), strategy="1/2/1/1"
        )
        torch.testing.assert_close(plan(x), model(x).detach())
        return abs(step(x, x) - float(F.mse_loss(model(x), x).detach()))

    found = at_once(4, work)
    assert not [r for r in found if isinstance(r, Exception)]
    assert max(found) < 1e-5


def test_steps_of_training_follow_each_other() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3).double(), torch.randn(7, 5).double(), torch.randn(7, 3).double()
    rates = []

    class Recorded(dr.lr.Constant):
        def __call__(self, step: int) -> float:
            rates.append(step)
            return super().__call__(step)

    steps = dr.compile_training(
        model, F.mse_loss, optimizer=dr.optim.SGD(lr=Recorded(0.1)), example_batch=(x, y), strategy="3/1/1/1"
    )
    rates.clear()
    losses = [loss for found in at_once(4, lambda number: [steps(x, y) for _ in range(3)]) for loss in found]
    assert rates == list(range(12))
    # Each step finds the weights that the one before it has left.
    expected = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert sorted(losses, reverse=True) == pytest.approx(expected)
