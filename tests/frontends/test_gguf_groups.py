"""Quantized weights of a GGUF file, number by number from the blocks that its format describes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from distir_relax.bundle import FileTensor, StoredGroups
from distir_relax.frontends.gguf_groups import GROUP_BITS, read_groups
from distir_relax.ir import TensorType
from distir_relax.kernels.quantized import dequantize
from distir_relax.precision.quantized_tensors import group_tensors, stored_groups
from distir_relax.support.deferred_tensor import DeferredTensor

ROWS, BLOCKS = 3, 5


def numbers_of(kind: str, block: bytes) -> list[float]:
    """The 32 numbers of a block, as ``dequantize_row`` of ggml computes them."""
    if kind == "Q8_0":
        (d,) = struct.unpack("<e", block[:2])
        return [d * n for n in struct.unpack("<32b", block[2:])]
    if kind == "Q4_0":
        (d,), m, rest = struct.unpack("<e", block[:2]), 0.0, block[2:]
        m = -8 * d
    else:
        d, m = struct.unpack("<2e", block[:4])
        rest = block[4:]
    return [d * (byte & 15) + m for byte in rest] + [d * (byte >> 4) + m for byte in rest]


def drawn(kind: str) -> tuple[Any, torch.Tensor]:
    """The bytes of a weight, and its numbers."""
    rng = np.random.default_rng(7)
    floats = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}[kind]
    rows, numbers = [], []
    for _ in range(ROWS):
        blocks = [
            rng.standard_normal(floats).astype("<f2").tobytes() + rng.bytes(4 * GROUP_BITS[kind]) for _ in range(BLOCKS)
        ]
        rows.append(np.frombuffer(b"".join(blocks), np.uint8))
        numbers.append([n for block in blocks for n in numbers_of(kind, block)])
    return np.stack(rows), torch.tensor(numbers)


@pytest.mark.parametrize("kind", GROUP_BITS)
def test_all_numbers_are_those_of_the_file(kind: str) -> None:
    data, numbers = drawn(kind)
    found = read_groups(kind, data)
    assert len(found) == (2 if kind == "Q8_0" else 3)
    torch.testing.assert_close(dequantize(*found), numbers, rtol=1e-6, atol=1e-6)


def test_a_deferred_weight_has_the_groups_of_its_file() -> None:
    """Also as a parameter of a model, and detached."""
    data, _ = drawn("Q4_1")
    source: Any = FileTensor(None, "w", "float32", True, lambda: StoredGroups(4, lambda: read_groups("Q4_1", data)))  # type: ignore[arg-type]
    weight = DeferredTensor(torch.empty(ROWS, 32 * BLOCKS, device="meta"), lambda: torch.zeros(0), source)
    groups = stored_groups(torch.nn.Parameter(weight, requires_grad=False).detach())
    assert groups is not None
    numbers = TensorType((ROWS, BLOCKS, 1), "float16")
    found: list[Any] = group_tensors("w", groups, [TensorType((ROWS, BLOCKS, 16), "uint8"), numbers, numbers])
    for tensor, expected in zip(found, read_groups("Q4_1", data), strict=True):
        assert tensor.shape == expected.shape
        assert torch.equal(tensor.read(), expected)
    assert stored_groups(torch.zeros(3, 32)) is None
