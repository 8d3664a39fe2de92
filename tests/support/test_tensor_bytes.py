"""Bytes of tensors of any strides."""

from __future__ import annotations

import pytest
import torch

from distir_relax.runtime.transports.torch_distributed import _movable
from distir_relax.support.tensor_bytes import tensor_bytes

TENSORS = {
    "several rows": torch.arange(12.0).reshape(3, 4),
    "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "one element of a column": torch.arange(12.0).reshape(3, 4)[1:2, 1],
    "no element of a column": torch.arange(12.0).reshape(3, 4)[:0, 1],
    "no element of an expanded scalar": torch.zeros(()).expand(4)[:0],
    "one element of an expanded scalar": torch.ones((), dtype=torch.bfloat16).expand(4)[:1],
    "a scalar": torch.tensor(7),
}


@pytest.mark.parametrize("name", TENSORS)
def test_elements_are_in_order(name: str) -> None:
    x = TENSORS[name]
    expected = torch.tensor(x.tolist(), dtype=x.dtype).reshape(-1).view(torch.uint8)
    assert torch.equal(tensor_bytes(x), expected)
    if x.dim() == 1:
        assert torch.equal(_movable(x), expected)
