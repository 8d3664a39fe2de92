"""Steps in place, in blocks: the numbers of the op table's expressions, whatever the size and the layout."""

from __future__ import annotations

import pytest
import torch

from distir_relax.ir import Op, TensorType, Value
from distir_relax.kernels import updates
from distir_relax.ops import evaluate


def reference(name: str, operands: list[torch.Tensor], **attrs: float) -> torch.Tensor:
    """What the op table says."""
    values = tuple(Value(f"x{i}", TensorType(tuple(x.shape), "float64")) for i, x in enumerate(operands))
    (found,) = evaluate(Op(name, values, (), attrs), operands)
    return found


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (updates.BLOCK + 3,), (3, updates.BLOCK)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_give_what_the_whole_gives(shape: tuple[int, ...], turned: bool) -> None:
    torch.manual_seed(0)
    weight, average, square = (torch.randn(shape, dtype=torch.float64).abs() for _ in range(3))
    if turned:
        average = average.t().contiguous().t() if average.dim() > 1 else average
    rate, size, floor = (torch.tensor(x, dtype=torch.float64) for x in (0.3, 0.2, 1e-8))
    for decay in (0.0, 0.1):
        expected = reference("adam_step", [weight, average, square, rate, size, floor], decay=decay)
        found = weight.clone()
        assert updates.adam_step(found, average, square, rate, size, floor, decay) is found
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    expected = reference("moving_square", [square, average], decay=0.9)
    found = square.clone()
    assert updates.moving_square(found, average, 0.9) is found
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
