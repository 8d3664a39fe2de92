"""Numbers in place of those of files, where a program is compared with its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distir_relax.bundle import FileTensor, FileWeights, drawn_weights
from distir_relax.support.large_memory import large_empty


@pytest.fixture
def file(tmp_path: Path) -> FileWeights:
    """Two large matrices of one shape, another one, and tensors that are always read."""
    tensors = {
        "a": torch.ones(2049, 2048, dtype=torch.bfloat16), "b": torch.ones(2049, 2048, dtype=torch.bfloat16),
        "c": torch.ones(3, 1999, 1024), "small": torch.ones(2047, 2048),
        "ids": torch.ones(2049, 2048, dtype=torch.int32),
    }  # fmt: skip
    save_file(tensors, tmp_path / "weights.safetensors")
    return FileWeights(tmp_path / "weights.safetensors", [])


def test_large_tensors_are_drawn_within(file: FileWeights) -> None:
    read = {name: FileTensor.deferred(file, name) for name in ("a", "b", "c", "small", "ids")}
    with drawn_weights():
        drawn = {name: tensor.read() for name, tensor in read.items()}
        again = {name: tensor.to(torch.float32).read() for name, tensor in read.items() if name in "ab"}
    assert all(drawn[name].shape == tensor.shape and drawn[name].dtype == tensor.dtype for name, tensor in read.items())
    for name in ("a", "b", "c"):
        assert 0.019 < float(drawn[name].float().std()) < 0.021
        rows = drawn[name].flatten(0, -2)
        assert len(rows.unique(dim=0)) == len(rows)
    assert not torch.equal(drawn["a"], drawn["b"])
    for name, x in again.items():
        torch.testing.assert_close(x, drawn[name].float(), rtol=1e-2, atol=0)
    for name in ("small", "ids"):
        assert torch.equal(drawn[name], torch.ones_like(drawn[name]))
    assert all(bool((tensor.read() == 1).all()) for tensor in read.values())


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 21,), (5, 1 << 21, 1), (4 << 20,)])
def test_memory_in_large_pages_is_memory(shape: tuple[int, ...]) -> None:
    x = large_empty(shape, torch.float32).fill_(3)
    assert x.shape == shape
    assert bool((x == 3).all())
