"""Models that write into memory: through views, into buffers and inputs. Empty tensors, and complex ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distir_relax import DeviceMesh, annotate_sharding, compile
from distir_relax.errors import AnnotationError, ImportModelError, PlacementError

MESH = DeviceMesh((3,))


class Counting(torch.nn.Module):
    """Changes two buffers, one through a view, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(4, 7))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        y[:, :1] = y[:, 2:3]
        y[0].fill_(3.0)
        self.count.add_(1)
        self.rows[1:] += y[:3]
        x[0].add_(y[1, :5])
        return y * self.count, self.rows.sum(0)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("placement", ["S[0]", "S[1]"])
def test_a_buffer_that_the_model_changes_is_state(tail: str, placement: str, backend: str) -> None:
    model, x = Counting(), torch.randn(4, 5)
    plan = compile(model, (x.clone(),), shardings={"linear.weight": placement, "rows": "S[1]"}, mesh=MESH, tail=tail)
    roles = {item.value.name: item.role for item in plan.modules["sharded"].main.inputs}
    assert roles["count"] == roles["rows"] == "state"
    ours, theirs = x.clone(), x.clone()
    for _ in range(3):
        found = plan(ours, backend=backend)
        with torch.no_grad():
            expected = model(theirs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(ours, theirs)


def test_a_state_that_lies_unlike_its_new_value_is_refused() -> None:
    class Marked(Counting):
        def forward(self, x: torch.Tensor) -> Any:
            y = annotate_sharding(self.linear(x), MESH, "S[0]")
            self.rows.copy_(self.rows * 0.5 + y)
            return y

    plan = compile(Marked(), (torch.ones(4, 5),), shardings={"rows": "R"}, mesh=MESH)
    with pytest.raises(PlacementError, match="the state 'rows' is placed as R, and its new value as S"):
        plan(torch.ones(4, 5))


def test_a_parameter_that_the_model_changes_is_refused() -> None:
    class Call(Counting):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                self.linear.weight.mul_(2)
            return self.linear(x)

    with pytest.raises(ImportModelError, match=r"changes 'linear.weight', a parameter"):
        compile(Call(), (torch.ones(3, 5),))


def test_what_was_a_buffer_before_its_change_may_be_returned_only_as_a_copy() -> None:
    class Before(Counting):
        def forward(self, x: torch.Tensor) -> Any:
            old = self.rows * 2
            self.rows.copy_(self.linear(x))
            return old

    torch.manual_seed(0)
    model, x = Before(), torch.randn(4, 5)
    plan = compile(model, (x,), shardings={"linear.weight": "S[0]"}, mesh=MESH)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(plan(x), model(x))


@pytest.mark.parametrize("placement", ["S[0]", "S[1]"])
def test_batch_norm_in_training_mode_keeps_its_statistics(placement: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 7, 3), torch.nn.BatchNorm2d(7), torch.nn.ReLU()).train()
    data = [torch.randn(5, 3, 6, 5) for _ in range(3)]
    plan = compile(model, (data[0],), shardings={"0.weight": placement}, mesh=MESH)
    for x in data:
        with torch.no_grad():
            torch.testing.assert_close(plan(x), model(x))
    model.eval()


class Empty(torch.nn.Module):
    """A part of the rows that is rotated, and a rest without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 12)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x).reshape(2, 3, 3, 4)
        turned, rest = h[..., :4], h[..., 4:]
        h = torch.cat([turned * 2, rest], -1)
        return h.transpose(1, 2).reshape(2, 3, 12), rest.sum(-1), torch.cat([rest, rest], -2).reshape(2, 0, 3)


class Rotary(torch.nn.Module):
    """Rotary embeddings as complex numbers, and a filter in the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 12)
        self.register_buffer("turns", torch.polar(torch.ones(7, 6), torch.randn(7, 6)), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.view_as_complex(self.linear(x).reshape(3, 7, 6, 2))
        y = torch.view_as_real(h * self.turns).flatten(2)
        spectrum = torch.fft.rfft2(y, dim=(1, 2), norm="ortho")
        return torch.fft.irfft2(spectrum * spectrum.abs(), s=(7, 12), dim=(1, 2), norm="ortho"), torch.fft.fft(y).real


@pytest.mark.parametrize("placement", ["S[0]", "S[1]"])
@pytest.mark.parametrize(("kind", "shape"), [(Empty, (2, 3, 5)), (Rotary, (3, 7, 5))])
def test_split_on_three_ranks(kind: Any, shape: tuple[int, ...], placement: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    plan = compile(model, (x,), shardings={"linear.weight": placement}, mesh=MESH)
    with torch.no_grad():
        for a, b in zip(plan(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_not_used_is_not_one_that_does_not_exist() -> None:
    model, x = Empty(), torch.randn(2, 3, 5)
    model.spare = torch.nn.Linear(3, 3)
    with pytest.raises(AnnotationError, match=r"'spare\.weight' is a parameter that this call .* does not use"):
        compile(model, (x,), shardings={"spare.weight": "S[0]"}, mesh=MESH)
    with pytest.raises(AnnotationError, match="matches no input and no parameter"):
        compile(model, (x,), shardings={"spar.weight": "S[0]"}, mesh=MESH)
    compile(model, (x,), shardings={"*.weight": "S[0]"}, mesh=MESH)
