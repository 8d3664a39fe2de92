"""Pooling that says where its largest elements stand, and pooling to unequal windows, on split pictures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.ir import verify
from distir_relax.ops import check

torch.set_num_threads(1)


class Calls(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, picture: torch.Tensor) -> object:
        return self.function(picture)


def unpooled(x: torch.Tensor) -> torch.Tensor:
    """As in SegNet: down and up again, each element back to where it was."""
    y, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(torch.relu(y), places, 2, output_size=list(x.shape[2:]))


FUNCTIONS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "max_unpool2d": unpooled,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", ["torch", "tvm"])
def test_equal_elements_are_found_in_the_order_of_the_whole_plane(name: str, backend: str) -> None:
    # Small integers: every window has several largest elements.
    picture = torch.randint(-2, 3, (3, 2, 11, 7), generator=torch.Generator().manual_seed(0)).float()
    model = Calls(FUNCTIONS[name]).eval()
    expected = model(picture)
    layouts = ["S[2]", "S[3]", "S[0]", "S[2: 0|5|6]"] if backend == "torch" else ["S[2]"]
    for layout in layouts:
        for ranks, tail in ((2, "ragged"), (3, "pad"), (5, "ragged")):
            if ranks != 3 and (":" in layout or backend == "tvm"):
                continue
            mesh = dr.DeviceMesh((ranks,), ("rows",))
            plan = dr.compile(model, (picture,), shardings={"picture": layout}, mesh=mesh, tail=tail)
            for module in plan.modules.values():
                verify(module, check)
            torch.testing.assert_close(plan(picture, backend=backend), expected, atol=1e-6, rtol=1e-6)
