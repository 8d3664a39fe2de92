"""Gradients where formulas are apt to fail: zeros among factors, equal extremes. Against torch's autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gradients import by_autograd, case, largest_error
from samples import SAMPLES

from distir_relax.autodiff import gradients
from distir_relax.errors import UnsupportedOpError
from distir_relax.interpret import interpret
from distir_relax.ir import TensorType
from distir_relax.ops import Builder

# Rounded, a normal distribution is full of zeros and of equal numbers.
ROUNDED = (
    *("scatter_elements", "prod", "cumprod"),
    *(f"nn.{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)),
)


@pytest.mark.parametrize(("name", "number"), [(name, i) for name in ROUNDED for i in range(len(SAMPLES[name]))])
def test_gradients_of_zeros_and_of_equal_numbers_are_those_of_autograd(name: str, number: int) -> None:
    for seed in range(3):
        one = case(name, number, seed)
        one = replace(one, operands=tuple(x.round() for x in one.operands))
        found = list(interpret(one.module, one.inputs).values())
        assert largest_error(found, by_autograd(one)) < 1e-9


def test_an_image_that_is_read_by_cubics_has_no_gradient() -> None:
    g = Builder()
    x, grid = g.input("x", TensorType((1, 1, 4, 5), "float64")), g.input("grid", TensorType((1, 3, 2, 2), "float64"))
    y = g.emit("image.grid_sample", x, grid, method="bicubic", padding_mode="zeros", align_corners=False)
    with pytest.raises(UnsupportedOpError, match="'bicubic' has no gradient"):
        gradients(g, tuple(g.ops), {y.name: y}, ["x"])
