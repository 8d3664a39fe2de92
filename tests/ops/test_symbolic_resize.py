"""Resizing and adaptive pooling of images of symbolic sizes: torch's numbers, also where the image is split by rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.errors import DistIRError, UnsupportedOpError

Use = Callable[[torch.Tensor], torch.Tensor]

USES: dict[str, Use] = {
    "to a size": lambda x: F.interpolate(x, size=(17, x.shape[3]), mode="bilinear"),
    "nearest, by 1.5": lambda x: F.interpolate(x, scale_factor=1.5),
    "exact, by half": lambda x: F.interpolate(x, scale_factor=0.5, mode="nearest-exact"),
    "linear, by half": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "aligned, by 2": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "cubic, by 1.25": lambda x: F.interpolate(x, scale_factor=1.25, mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    "of one dim": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "mean": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "maximum": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
}


class Image(torch.nn.Module):
    """Runs `use` on an image."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x)


def compiled(use: Use, placement: str) -> dr.Plan:
    dims = {0: "batch", 2: dr.Dim("height", min=4), 3: dr.Dim("width", min=4)}
    return dr.compile(
        Image(use), (torch.randn(2, 3, 10, 12),), mesh=3, shardings={"x": placement}, dynamic_shapes={"x": dims}
    )


@pytest.mark.drawn(7)
@pytest.mark.parametrize("placement", ["S[0]", "S[2]"])
@pytest.mark.parametrize("name", USES)
def test_it_gives_what_torch_gives(name: str, placement: str) -> None:
    plan = compiled(USES[name], placement)
    assert not plan.modules["global"].guards
    for shape in ((1, 3, 4, 5), (2, 3, 7, 6), (5, 3, 31, 11)):
        x = torch.randn(shape)
        torch.testing.assert_close(plan(x), USES[name](x), atol=1e-5, rtol=1e-5)


def test_a_decimal_scale_rounds_and_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match=r"a resize of height by 1\.3: expected a scale such as 2 or 0\.25"):
        compiled(lambda x: F.interpolate(x, scale_factor=1.3), "S[0]")


@pytest.mark.parametrize("use", [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.interpolate(x, scale_factor=2)])
def test_a_window_over_a_split_dim_is_refused_at_its_op(use: Use) -> None:
    assert compiled(use, "S[0]")
    with pytest.raises(DistIRError, match=r"^test_symbolic_resize\.py:\d+: nn\.\w+ cannot be split .* along dim 2 of "):
        compiled(use, "S[2]")
