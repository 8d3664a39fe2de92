"""Deferred tensors: ops give the results of ordinary tensors, data are read when they are needed, and not kept."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional

from distir_relax.support.deferred_tensor import DeferredTensor, read_deferred


@dataclass
class Source:
    """A source that counts its reads, and remembers the data that it gave."""

    data: torch.Tensor
    given: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def whole(self) -> torch.Tensor:
        data = self.data.clone()
        self.given.append(weakref.ref(data))
        return data

    def widened(self, dtype: torch.dtype) -> Source | None:
        return Source(self.data.to(dtype), self.given) if dtype == torch.float32 else None


def deferred(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[DeferredTensor, torch.Tensor, Source]:
    data = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    source = Source(data)
    return DeferredTensor.of(data.shape, data.dtype, source), data, source


OPS: list[Any] = [
    lambda w: w.t(),
    lambda w: w[1:3, ::2],
    lambda w: w.reshape(7, 5).contiguous(),
    lambda w: torch.stack([w, w + 1]),
    lambda w: torch.cat([w, w.flip(0)], 1),
    lambda w: w.chunk(3)[2],
    lambda w: w.to(device="cpu", dtype=torch.float64),
    lambda w: torch.zeros(5, 7).copy_(w),
    lambda w: functional.linear(torch.ones(3, 7), w),
    lambda w: functional.embedding(torch.tensor([[4, 0]]), w),
    lambda w: torch.ones(5, 7) * w,
]


@pytest.mark.parametrize("number", range(len(OPS)))
def test_results_are_those_of_an_ordinary_tensor(number: int) -> None:
    w, data, source = deferred(5, 7)
    expected, found = OPS[number](data), OPS[number](w)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    # Only ops with another tensor need data.
    assert bool(source.given) != isinstance(found, DeferredTensor)
    assert torch.equal(read_deferred(found), expected)


def test_data_are_freed_after_each_op() -> None:
    w, _, source = deferred(5, 7)
    for _ in range(3):
        functional.linear(torch.ones(3, 7), w)
    gc.collect()
    assert [given() for given in source.given] == [None] * 3


def test_sources_of_casts_and_copies() -> None:
    w, data, _ = deferred(5, 7, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(w)
    assert isinstance(parameter, torch.nn.Parameter)
    for same in (w.detach(), w.float(), parameter, copy.deepcopy(parameter), parameter.detach().float()):
        assert isinstance(same, DeferredTensor)
        assert torch.equal(same.source.whole(), data.to(same.dtype))
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    for other in (w.double(), w.t(), w[:3]):
        assert isinstance(other, DeferredTensor)
        assert other.source is None


def test_writes_are_refused() -> None:
    w, _, _ = deferred(5, 7)
    with pytest.raises(RuntimeError, match="writes to a tensor whose data are read when an op needs them"):
        w.add_(1)
