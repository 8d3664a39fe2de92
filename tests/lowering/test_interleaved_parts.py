"""A flattened batch of split sequences: a device has a symbolic number of parts of it, and sends them as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError

MESHES = {(3,): ("S[1]",), (2, 3): ("S[1], S[1]", "S[0], S[1]", "S[1], S[0]"), (2, 2): ("S[1], S[2]",)}
LAYOUTS = [(shape, placements) for shape, several in MESHES.items() for placements in several]

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "returned": lambda y: y * 2,
    "normalized": lambda y: torch.softmax(y, 0),
    "summed": lambda y: (y * y).sum(0),
    "in order": lambda y: y.cumsum(0),
    "contracted": lambda y: y.T @ y,
    "sorted": lambda y: y.sort(0)[0],
    "in halves": lambda y: y.view(-1, 4).cumsum(0),
    "in the last dim": lambda y: torch.softmax(y.T, 1),
}


class Flattened(nn.Module):
    """Runs `use` on the rows of all sequences."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x.reshape(-1, 8))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("use", USES)
def test_a_flattened_batch_gives_what_torch_gives(use: str, tail: str) -> None:
    model = Flattened(USES[use])
    for shape, placements in LAYOUTS:
        plan = dr.compile(
            model,
            (torch.randn(4, 6, 8),),
            mesh=shape,
            shardings={"x": placements},
            tail=tail,
            dynamic_shapes={"x": {0: "batch", 1: "length"}},
        )
        for batch, length in ((1, 1), (2, 7), (5, 3)):
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(plan(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_step_between_layouts_is_one_on_the_columns_of_a_matrix() -> None:
    model = Flattened(USES["normalized"])
    options = {"mesh": 3, "shardings": {"x": "S[1]"}, "dynamic_shapes": {"x": {0: "batch", 1: "length"}}}
    text = dr.compile(model, (torch.randn(4, 6, 8),), **options).text("distributed")
    assert "all_gather" in text
    assert "slices(" not in text


def test_what_has_no_such_matrix_is_refused_at_its_op() -> None:
    mesh = dr.DeviceMesh((2, 3), ("a", "b"))
    model = Flattened(lambda y: dr.annotate_sharding(y * 2, mesh, "S[0], S[0]") + 1)
    with pytest.raises(DistIRError, match=r"interleaved_parts\.py:\d+: redistribute cannot be split for every size: %"):
        dr.compile(
            model,
            (torch.randn(4, 6, 8),),
            mesh=mesh,
            shardings={"x": "S[0], S[1]"},
            dynamic_shapes={"x": {0: "batch", 1: "length"}},
        )
