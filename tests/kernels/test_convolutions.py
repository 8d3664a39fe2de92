"""Convolutions in bfloat16 whose results are one column wide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distir_relax.kernels import convolutions
from distir_relax.kernels.convolutions import convolution

FORMS = [
    # Width, kernel, stride, padding, dilation: those of one column, and others.
    (2, 3, 2, 1, 1), (1, 3, 1, 1, 1), (3, 3, 1, 0, 1), (2, 2, 3, 1, 2), (3, 3, 2, 1, 1), (2, 1, 2, 0, 1),
    (9, 3, 2, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_float32(
    dims: int, form: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For torch 2.13: where it has another version, see whether its oneDNN still reads what nobody wrote."""
    assert torch.__version__.startswith("2.13."), "try F.conv2d of these forms in bfloat16 on a processor with AMX"
    width, kernel, stride, padding, dilation = form
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 6, *(5,) * (dims - 1), width, generator=generator).to(dtype)
    weight = torch.randn(8, 3, *(1,) * (dims - 1), kernel, generator=generator).to(dtype)
    of_rows, used = (0,) * (dims - 1), list[torch.dtype]()
    arguments = (*(1,) * (dims - 1), stride), (*of_rows, padding), (*(1,) * (dims - 1), dilation), 2
    name = f"conv{dims}d"
    run = getattr(F, name)
    expected = run(x.double(), weight.double(), None, *arguments)
    monkeypatch.setattr(F, name, lambda x, *rest: (used.append(x.dtype), run(x, *rest))[1])
    found = convolution(x, weight, *arguments)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    is_one_column = expected.shape[-1] == 1 and kernel > 1
    assert used == [torch.float32 if is_one_column else dtype]
    assert convolutions._is_one_column(x, weight, *arguments[:3]) == is_one_column
