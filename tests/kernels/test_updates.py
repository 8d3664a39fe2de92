"""Steps in place, in blocks and by native kernels, whatever the size and the layout, against the op table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distir_relax.ir import Op, TensorType, Value
from distir_relax.kernels import updates
from distir_relax.ops import evaluate


def reference(name: str, operands: list[torch.Tensor], **attrs: float) -> torch.Tensor:
    """What the op table says."""
    dtype = str(operands[0].dtype).removeprefix("torch.")
    values = tuple(Value(f"x{i}", TensorType(tuple(x.shape), dtype)) for i, x in enumerate(operands))
    (found,) = evaluate(Op(name, values, (), attrs), operands)
    return found


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (updates.BLOCK + 3,), (3, updates.BLOCK)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_steps_in_place_give_what_the_whole_gives(
    shape: tuple[int, ...], turned: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    weight, average, square = (torch.randn(shape, dtype=dtype).abs() for _ in range(3))
    if turned:
        average = average.t().contiguous().t() if average.dim() > 1 else average
    rate, size, floor = (torch.tensor(x, dtype=dtype) for x in (0.3, 0.2, 1e-8))
    for decay in (0.0, 0.1):
        expected = reference("adam_step", [weight, average, square, rate, size, floor], decay=decay)
        found = weight.clone()
        assert updates.adam_step(found, average, square, rate, size, floor, decay) is found
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    expected = reference("moving_square", [square, average], decay=0.9)
    found = square.clone()
    assert updates.moving_square(found, average, 0.9) is found
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
