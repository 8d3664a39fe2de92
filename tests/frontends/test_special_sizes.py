"""Models with a case of their own for a size of 0 or 1: torch.export ignores it, the import does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.importer import import_torch


class Wrapped(torch.nn.Module):
    """Runs `use` on its input."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(x)


def equal_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] == 1 else x


def above_one(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1) if x.shape[1] > 1 else x - 1


def none(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) if x.shape[1] else x.new_ones(x.shape[0], 5)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) if x.shape[1] == 1 else x.mul_(2)


def same_result(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1) if x.shape[1] > 1 else torch.ones_like(x)


def raises(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == 1:
        raise ValueError("too short")
    return x + 1


def imported(use: Callable[..., Any], low: int = 1, **options: Any) -> Any:
    dims = {"x": {0: "batch", 1: dr.Dim("length", min=low)}}
    return import_torch(Wrapped(use), (torch.randn(2, 4, 5),), check=True, dynamic_shapes=dims, **options)


@pytest.mark.parametrize(
    ("use", "size"), [(equal_one, 1), (above_one, 1), (none, 0), (in_place, 1)], ids=lambda v: getattr(v, "__name__", v)
)
def test_a_case_for_a_size_is_refused_with_its_line(use: Callable[..., Any], size: int) -> None:
    line = use.__code__.co_firstlineno + 1
    with pytest.raises(
        ImportModelError,
        match=rf"^test_special_sizes\.py:{line}: the model has a case of its own for length = {size}, ",
    ) as raised:
        imported(use, low=0 if size == 0 else 1)
    assert raised.value.hint.endswith(f"or exclude the size: dr.Dim('length', min={size + 1})")
    assert imported(use, low=size + 1)


@pytest.mark.parametrize("use", [same_result, raises])
def test_a_case_that_changes_no_result_is_not(use: Callable[..., Any]) -> None:
    assert not imported(use).module.guards


def test_a_size_that_a_guard_excludes_is_not_compared() -> None:
    found = imported(lambda x: x.squeeze(1))
    assert [str(guard) for guard in found.module.guards] == ["length != 1"]


def test_a_case_is_refused_in_training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), Wrapped(lambda x: x * 3 if x.shape[0] == 1 else x))
    with pytest.raises(ImportModelError, match=r"the model has a case of its own for batch = 1, "):
        dr.compile_training(
            model, torch.nn.functional.mse_loss, optimizer=dr.optim.SGD(lr=0.1), strategy="1/1/1/1",
            example_batch=(torch.randn(4, 5), torch.randn(4, 3)),
            dynamic_shapes={"input": {0: "batch"}, "targets": {0: "batch"}},
        )  # fmt: skip
