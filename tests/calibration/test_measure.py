"""Ops and collectives are measured as programs run them: called from Python, and in lists of native calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distir_relax.calibration.measure import _collectives, _recorded, _recorded_all_reduces, groups_of, time_op
from distir_relax.calibration.microbenchmarks import OpSample, dtypes_of, op_samples
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.transports.threads import ThreadWorld


def drawn(sample: OpSample) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(kind.shape, generator=generator).to(getattr(torch, kind.dtype)) for kind in sample.operands]


@pytest.mark.usefixtures("native_products")
@pytest.mark.parametrize("dtype", dtypes_of("cpu"))
def test_recorded_samples_run_without_python(dtype: str) -> None:
    samples = [sample for sample in op_samples(dtype, 1) if sample.recorded]
    # One of each op and kind.
    chosen = {(sample.op, sample.cached): sample for sample in reversed(samples)}
    assert len(chosen) == (1 if dtype in ("int8", "uint8") else 15)
    for sample in chosen.values():
        found = time_op(sample, "cpu", lambda: None, limit=0.002)
        assert len(found) == 2, str(sample)
        assert min(found) > 0, str(sample)


def test_there_are_no_times_of_a_recorded_op_without_a_kernel() -> None:
    sample = next(s for s in op_samples("float32", 1) if s.op == "tanh")
    assert time_op(OpSample(sample.group, "tanh", sample.operands, recorded=True), "cpu", lambda: None, 0.002) == []


def test_decoding_reads_the_cache_of_each_layer() -> None:
    sample = next(s for s in op_samples("float32", 1) if s.cached)
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn(sample)]
    step = _recorded(sample, inputs)
    assert not step.failure
    assert step.python_calls == 0
    assert step.native_calls == 20
    caches = 20 * sum(x.nbytes for x in inputs[1:])
    assert caches > 2e6, "they do not stay in the nearest cache"


def test_collectives_of_nothing_are_not_measured() -> None:
    comm = ThreadWorld(DeviceMesh((1, 5), ("apart", "together"))).communicator(0, "cpu")
    names = [timed.name for timed in _collectives(comm, 3, "cpu", None)]
    assert names == ["all_reduce", "all_gather", "reduce_scatter"], "3 elements make no rows for 5 ranks"
    sizes = {timed.name: timed.bytes for timed in _collectives(comm, 190, "cpu", None)}
    assert sizes["all_to_all"] == 4 * 190


@pytest.mark.parametrize(
    ("host_of", "groups"),
    [
        ([0, 0, 0], [(3, 1, "")]),
        ([0, 0, 0, 0], [(2, 1, ""), (4, 1, "")]),
        ([0, 1, 2], [(3, 1, "network")]),
        ([0, 0, 2], [(3, 1, "network")]),
        ([0, 0, 2, 2], [(2, 1, "host"), (2, 2, "network"), (4, 1, "network")]),
        ([0, 0, 0, 3, 3, 3, 6, 6, 6], [(3, 1, "host"), (3, 3, "network"), (9, 1, "network")]),
    ],
)
def test_groups_are_within_hosts_and_between_them(host_of: list[int], groups: list[tuple[int, int, str]]) -> None:
    assert groups_of(host_of) == groups


def test_messages_between_hosts_are_timed_by_two_ranks() -> None:
    world = ThreadWorld(DeviceMesh((1, 3, 1), ("apart", "together", "inner")))
    sends = [
        timed
        for rank in range(3)
        for timed in _collectives(world.communicator(rank, "cpu"), 7, "cpu", (0, 2))
        if timed.name == "send"
    ]
    assert [(timed.ranks, timed.takes_part) for timed in sends] == [(2, True), (2, False), (2, True)]
    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(lambda timed: timed.run(), sends)]) == 3


def test_ranks_that_share_no_memory_have_no_native_sums() -> None:
    world = ThreadWorld(DeviceMesh((1, 3), ("apart", "together")))
    with ThreadPoolExecutor(3) as pool:
        steps = list(pool.map(lambda rank: _recorded_all_reduces(world.communicator(rank, "cpu"), 7), range(3)))
    assert [step.python_calls for step in steps] == [20] * 3
