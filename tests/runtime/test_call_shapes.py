"""The sizes of a call, from its inputs, and what is refused before anything runs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.bundle import Manifest
from distir_relax.errors import BundleError, RunError
from distir_relax.runtime.call_shapes import CallShapes


class Pair(nn.Module):
    """A product of two inputs of one batch; the second row of the first is added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * y + self.linear(x)[1:2]


DYNAMIC = {"x": {0: dr.Dim("batch", max=8)}, "y": {0: dr.Dim("batch", max=8)}}


@pytest.fixture(scope="module")
def plan() -> dr.Plan:
    torch.manual_seed(0)
    model, example = Pair().eval(), (torch.randn(3, 4), torch.randn(3, 5))
    return dr.compile(model, example, dynamic_shapes=DYNAMIC, strategy="2/1/1/1", verify=True)


def test_the_manifest_is_that_of_the_sizes(plan: dr.Plan) -> None:
    manifest = plan.bundle(("torch",)).manifest
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()
    call = CallShapes(manifest).of({"x": torch.zeros(5, 4), "y": torch.zeros(5, 5)})
    assert call.sizes == {"batch": 5}
    assert [t.shape for t in (*call.manifest.inputs, *call.manifest.outputs)] == [(5, 4), (5, 5), (5, 5)]
    assert call.manifest.inputs[0].shards[0].intervals == (((0, 3),), ((3, 5),))


def test_calls_of_equal_sizes_share_a_manifest(plan: dr.Plan) -> None:
    calls = CallShapes(plan.bundle(("torch",)).manifest)
    inputs = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 5)}
    assert calls.of(inputs) is calls.of(inputs)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((9, 4), (9, 5), "expected batch of at least 1 and at most 8, found 9"),
        ((3, 4), (4, 5), "batch is 3 in dim 0 of input 'x', found 4"),
        ((1, 4), (1, 5), r"found batch = 1"),
        ((3, 4), (5,), r"expected float32 \(3, 5\), found float32 \(5,\)"),
        ((4,), (5,), "expected an input with batch"),
        ((3, 7), (3, 5), r"expected float32 \(3, 4\), found float32 \(3, 7\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(plan: dr.Plan, x: tuple[int, ...], y: tuple[int, ...], message: str) -> None:
    with pytest.raises(RunError, match=message):
        plan(torch.zeros(x), torch.zeros(y))


def test_the_plan_still_runs_after_a_refusal(plan: dr.Plan) -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    with torch.no_grad():
        for batch in (2, 8, 3):
            x, y = torch.randn(batch, 4), torch.randn(batch, 5)
            torch.testing.assert_close(plan(x, y), model(x, y))


def test_calls_of_several_threads_have_their_own_sizes(plan: dr.Plan) -> None:
    torch.manual_seed(0)
    model, found = Pair().eval(), {}

    def call(batch: int) -> None:
        generator = torch.Generator().manual_seed(batch)
        x, y = torch.randn(batch, 4, generator=generator), torch.randn(batch, 5, generator=generator)
        with torch.no_grad():
            found[batch] = plan(x, y), model(x, y)

    threads = [threading.Thread(target=call, args=(batch,)) for batch in (2, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for ours, theirs in found.values():
        torch.testing.assert_close(ours, theirs)


def test_a_new_size_costs_little(plan: dr.Plan) -> None:
    calls = CallShapes(plan.bundle(("torch",)).manifest)
    start = time.perf_counter()
    for batch in range(2, 9):
        calls.of({"x": torch.zeros(batch, 4), "y": torch.zeros(batch, 5)})
    assert (time.perf_counter() - start) / 7 < 2e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["inputs"][0].update(shape=["batch + 1", 4]), None),
        (lambda m: m["inputs"][0].update(shape=["rows", 4]), "no size 'rows'"),
        (lambda m: m["inputs"][0].update(shape=["batch * (", 4]), "expected a size"),
        (lambda m: m["symbols"][0].update(low=9, high=3), "expected bounds"),
        (lambda m: m["symbols"][0].update(name="not a name"), "identifier"),
        (lambda m: m["guards"].append({"first": 1, "relation": ">", "second": 2, "holds": True}), "relation"),
    ],
)
def test_a_manifest_with_sizes_that_do_not_parse(plan: dr.Plan, change: Any, message: str | None) -> None:
    plain = json.loads(json.dumps(plan.bundle(("torch",)).manifest.to_json()))
    change(plain)
    if message is None:
        assert str(Manifest.from_json(plain).inputs[0].shape[0]) == "batch + 1"
        return
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(plain)
