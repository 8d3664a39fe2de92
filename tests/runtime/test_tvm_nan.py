"""NaN propagation on the tvm backend: each op compiled by TVM, on data with NaN and infinities, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app

pytest.importorskip("tvm")

Op = Callable[[torch.Tensor], Any]

OTHER = torch.linspace(-2, 2, 42, dtype=torch.float64).reshape(7, 6)
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(7, 6)

ELEMENTWISE: dict[str, Op] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "clamp_tensor": lambda x: x.clamp(OTHER - 1, OTHER),
    "maximum": lambda x: x.maximum(OTHER),
    "maximum_of_nan": lambda x: OTHER.maximum(x),
    "minimum": lambda x: x.minimum(OTHER[0]),
    "minimum_of_nan": lambda x: OTHER[:, :1].minimum(x),
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "threshold": lambda x: F.threshold(x, 0.5, 9.0),
    "leaky_relu": F.leaky_relu,
    "logaddexp": lambda x: torch.logaddexp(x, OTHER),
    "not_equal": lambda x: x != x,
    "equal": lambda x: x == x,
    "not_equal_to_a_copy": lambda x: (x * 2) != (x * 2),
    "sign": torch.sign,
    "times_zero": lambda x: x * 0,
    "zero_times": lambda x: 0.0 * x,
    "times_zeros": lambda x: x * torch.zeros((), dtype=x.dtype),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()),
}
REDUCTIONS: dict[str, Op] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0, keepdim=True),
    "max": torch.max,
    "min": torch.min,
    "max_dim": lambda x: x.max(1),
    "min_dim": lambda x: x.min(0),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(0),
    "argmax_of_all": torch.argmax,
    "norm_inf": lambda x: x.norm(math.inf, dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: F.softmax(x, 1),
    "scatter_amax": lambda x: x.new_zeros(7, 3).scatter_reduce(1, PLACES, x, "amax"),
    "scatter_amin": lambda x: x.new_zeros(7, 3).scatter_reduce(1, PLACES, x, "amin"),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2, 2),
    "max_pool2d": lambda x: F.max_pool2d(x[None, None], 3, 2, 1),
    "max_pool3d": lambda x: F.max_pool3d(x[None, None, None], (1, 2, 3), (1, 2, 1)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[None, None], (3, 4)),
    "sort": lambda x: torch.sort(x, stable=True, dim=1),
    "sort_descending": lambda x: torch.sort(x, stable=True, dim=0, descending=True),
    "argsort": lambda x: torch.argsort(x, stable=True, dim=0),
    "median": lambda x: torch.median(x, 1).values,
    "median_place": lambda x: torch.median(x[:3], 0).indices,
    "median_of_all": torch.median,
    "nanmedian": lambda x: torch.nanmedian(x, 1).values,
    "kthvalue": lambda x: torch.kthvalue(x, 5, 1).values,
    "cummax": lambda x: torch.cummax(x, 1),
    "cummin": lambda x: torch.cummin(x, 0),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "topk": lambda x: x[:2].topk(3, 1),
    "topk_smallest": lambda x: x[:2].topk(3, 1, largest=False),
}


class Ops(nn.Module):
    """All ops of the same data, one after the other."""

    def __init__(self, ops: dict[str, Op]) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found = {name: op(x) for name, op in self.ops.items()}
        return {name: tuple(y) if isinstance(y, tuple) else y for name, y in found.items()}


def data(dtype: torch.dtype) -> torch.Tensor:
    """Numbers, zeros, NaN, infinities; a row of NaN alone, and one of a single infinity."""
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in ((0, 1), (1, 0), (2, 5), (2, 3)):
        x[place] = math.nan
    x[2, 1], x[3, 4], x[3, 1], x[4, 0] = math.inf, math.inf, -math.inf, -0.0
    x[5], x[6] = math.nan, -math.inf
    return x


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, y in expected.items():
        torch.testing.assert_close(found[name], y, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("ops", [ELEMENTWISE, REDUCTIONS], ids=["elementwise", "reductions"])
def test_nan_reaches_what_it_reaches_in_torch(ops: dict[str, Op], ranks: int) -> None:
    model, x = Ops(ops), data(torch.float64)
    plan = dr.compile(model, (x,), mesh=ranks, shardings={"x": "S[0]"})
    compare(plan(x, backend="tvm"), model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_floats_pass_nan_on(dtype: torch.dtype) -> None:
    names = ("relu", "clamp", "not_equal", "amax", "argmax", "max_pool2d", "argsort")
    model, x = Ops({name: op for name, op in (ELEMENTWISE | REDUCTIONS).items() if name in names}), data(dtype)
    compare(dr.compile(model, (x,), mesh=1)(x, backend="tvm"), model(x))


def test_integers_keep_their_extremes() -> None:
    x = torch.randint(-9, 9, (7, 6), generator=torch.Generator().manual_seed(0))
    names = ("clamp_int", "max_dim", "argmin", "argsort", "equal", "scatter_amax")
    ops: dict[str, Op] = {**ELEMENTWISE, **REDUCTIONS, "clamp_int": lambda x: x.clamp(-3, 3)}
    model = Ops({name: ops[name] for name in names})
    compare(dr.compile(model, (x,), mesh=1)(x, backend="tvm"), model(x))


class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)


BUILD = """
import torch
from torch import nn

def build():
    return nn.ReLU(), (torch.ones(3),)
"""


def test_fast_math_leaves_nan_to_tvm(tmp_path: Path) -> None:
    x = torch.tensor([1.0, math.nan, -1.0])
    exact, fast = (dr.compile(Relu(), (x,), mesh=1, fast_math=fast) for fast in (False, True))
    assert exact(x, backend="tvm").isnan().tolist() == [False, True, False]
    assert fast(x, backend="tvm").isnan().tolist() == [False, False, False]
    assert "distir.fast_math" in str(fast.to_relax()[0]["main_0"])
    assert "distir.fast_math" not in str(exact.to_relax()[0]["main_0"])
    (tmp_path / "model.py").write_text(BUILD)
    arguments = ["compile", f"{tmp_path / 'model.py'}:build", "-o", str(tmp_path / "bundle"), "--mesh", "1"]
    for more in ([], ["--fast-math"]):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert dr.load(tmp_path / "bundle")(x, backend="tvm").isnan().any() == (not more)
