"""Symbolic dims of torch models: how they are declared, and what torch.export does not leave open."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch import import_torch
from distir_relax.ir.symbols import module_symbols


class Fixed(nn.Module):
    """Fixes its batch by a comparison, and its length by a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.shape[0] == 4:
            y = y + 1
        return torch.stack([y[:, i] for i in range(x.shape[1])], 1)


class Nested(nn.Module):
    """Takes tensors in a tuple and a dict, and a number."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], more: dict[str, torch.Tensor], k: int = 2) -> Any:
        return pair[0] * k + pair[1] + more["mask"]


class Scored(nn.Module):
    """Takes ids by name, and anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.linear = nn.Linear(6, 9)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        scores = self.linear(self.table(ids))
        for value in (mask, others.get("weight")):
            scores = scores if value is None else scores * value[..., None]
        return scores


class Wrapper(nn.Module):
    """Passes everything on, as models of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Scored()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


def line(text: str) -> int:
    lines, first = inspect.getsourcelines(Fixed)
    return first + next(i for i, code in enumerate(lines) if text in code)


@pytest.mark.parametrize(
    ("spec", "message", "text"),
    [
        ({0: "batch"}, "the model works for batch = 4 only", "if y.shape"),
        ({1: "length"}, "the model works for length = 6 only", "torch.stack"),
        ({0: "batch", 1: "length"}, "the model works for batch = 4 only", "if y.shape"),
    ],
)
def test_a_fixed_dim_is_an_error_with_its_line(spec: dict[int, str], message: str, text: str) -> None:
    with pytest.raises(ImportModelError, match=message) as caught:
        import_torch(Fixed(), (torch.zeros(4, 6),), dynamic_shapes={"x": spec})
    assert caught.value.where == f"test_dynamic_shapes.py:{line(text)}"


@pytest.mark.parametrize(
    ("spec", "dims", "message"),
    [
        ({"y": {0: "b"}}, {}, "no input 'y'"),
        ({"x": {3: "b"}}, {}, "expected a dim of 'input', 0 to 1, found 3"),
        ({"x": {0: 7.5}}, {}, "expected a name, a Dim, or None"),
        ({"x": {0: dr.Dim("b", max=3)}}, {}, "expected b of at least 1 and at most 3"),
        ({"x": {0: "b", 1: "b"}}, {}, "the size of b, found 6"),
        ({"x": {0: dr.Dim("b", max=8), 1: dr.Dim("b", max=9)}}, {}, "expected one range of b"),
        ({"x": {0: "b"}}, {"c": (1, 8)}, "no dim 'c'"),
        ({"x": {0: "b"}}, {"b": "many"}, "expected a size or bounds"),
    ],
)
def test_dims_that_are_none(spec: Any, dims: Any, message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        import_torch(nn.ReLU(), (torch.zeros(4, 6),), dynamic_shapes=_renamed(spec), dims=dims)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_bounds_of_a_hint_exclude_the_size_that_is_special(layers: int) -> None:
    model = nn.Sequential(*[nn.Conv1d(4, 4, 3) for _ in range(layers)])
    least = 2 * layers + 2
    with pytest.raises(ImportModelError, match=rf"hint: give it these bounds: t = Dim\('t', min={least}\)"):
        import_torch(model, (torch.zeros(2, 4, 12),), dynamic_shapes={"input": {2: "t"}})
    import_torch(model, (torch.zeros(2, 4, 12),), dynamic_shapes={"input": {2: dr.Dim("t", min=least)}})


def test_bounds_of_a_hint_exclude_the_whole_of_a_table() -> None:
    class Table(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + torch.ones(9, 9)[: x.shape[0], : x.shape[0]].sum(1)

    with pytest.raises(ImportModelError, match=r"t = Dim\('t', max=8\)"):
        import_torch(Table(), (torch.zeros(5),), dynamic_shapes={"x": {0: "t"}})
    import_torch(Table(), (torch.zeros(5),), dynamic_shapes={"x": {0: dr.Dim("t", max=8)}})


def test_an_example_of_one_is_no_example_of_any() -> None:
    with pytest.raises(ImportModelError, match="expected at least 2 in dim 0"):
        import_torch(nn.ReLU(), (torch.zeros(1, 6),), dynamic_shapes={"input": {0: "b"}})


@pytest.mark.parametrize(
    "dim",
    ["n", dr.Dim("n", min=2, max=9), torch.export.Dim("n", min=2, max=9)],
)
def test_a_dim_is_a_name_or_a_dim(dim: Any) -> None:
    imported = import_torch(nn.ReLU(), (torch.zeros(4, 6),), dynamic_shapes={"input": {0: dim}}, dims={"n": (2, 9)})
    (symbol,) = module_symbols(imported.module).values()
    assert (symbol.name, symbol.low, symbol.high, symbol.typical) == ("n", 2, 9, 4)


def test_a_text_has_the_bounds_given_elsewhere() -> None:
    inputs = (torch.zeros(4, 6), torch.zeros(4, 6)), {"mask": torch.zeros(6)}
    spec = {"pair": [{0: "b"}, {0: dr.Dim("b", max=7, typical=5), 1: "n"}], "more": {"mask": ["n"]}}
    with pytest.raises(ImportModelError):
        import_torch(Nested(), inputs, {"k": 3}, dynamic_shapes=spec)
    spec["pair"][0] = {0: "b", 1: "n"}
    imported = import_torch(Nested(), inputs, {"k": 3}, dynamic_shapes=spec, check=True)
    symbols = module_symbols(imported.module)
    assert (symbols["b"].high, symbols["b"].typical, symbols["n"].typical) == (7, 5, 6)
    shapes = {item.value.name: str(item.value.tensor) for item in imported.module.main.inputs}
    assert shapes == {"pair_0": "f32[b, n]", "pair_1": "f32[b, n]", "more.mask": "f32[n]"}


def test_one_size_fixes_a_dim() -> None:
    plan = dr.compile(
        nn.ReLU(), (torch.zeros(4, 6),), dynamic_shapes={"input": {0: "b", 1: "n"}}, dims={"n": 5}, mesh=1
    )
    assert list(plan.symbols) == ["b"]
    x = torch.randn(9, 5)
    torch.testing.assert_close(plan(x), x.relu())


def _renamed(spec: dict[str, Any]) -> dict[str, Any]:
    return {"input" if name == "x" else name: dims for name, dims in spec.items()}


@pytest.mark.parametrize(
    ("model", "by_position", "by_name"),
    [
        (Wrapper, (), ("ids", "mask")), (Wrapper, (), ("mask", "ids")), (Wrapper, ("ids",), ("mask",)),
        (Wrapper, ("ids", "mask"), ()), (Wrapper, ("ids",), ("weight", "mask")), (Scored, ("ids",), ("weight", "mask")),
        (Scored, (), ("mask", "weight", "ids")),
    ],
)  # fmt: skip
def test_arguments_that_a_model_collects(
    model: type[nn.Module], by_position: tuple[str, ...], by_name: tuple[str, ...]
) -> None:
    """``*args`` and ``**kwargs`` have dims, too; the model's own forward is back afterwards."""
    torch.manual_seed(0)
    made = model().eval()

    def arguments(rows: int, columns: int) -> tuple[list[Any], dict[str, Any]]:
        shape = (rows, columns)
        values = {"ids": torch.randint(0, 11, shape), "mask": torch.rand(shape), "weight": torch.rand(shape)}
        return [values[name] for name in by_position], {name: values[name] for name in by_name}

    names = [f"args_{i}" if model is Wrapper else name for i, name in enumerate(by_position)]
    spec = {name: [dr.Dim("batch"), dr.Dim("length")] for name in (*names, *by_name)}
    args, kwargs = arguments(3, 5)
    plan = dr.compile(made, tuple(args), kwargs, dynamic_shapes=spec, strategy="3/1/1/1")
    assert "forward" not in vars(made)
    args, kwargs = arguments(7, 2)
    assert torch.allclose(plan(*args, **kwargs), made(*args, **kwargs), atol=1e-6)
