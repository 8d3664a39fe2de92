"""What a program has built in: numbers of the example call, and what the model keeps in its attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distir_relax.errors import ImportModelError, RunError
from distir_relax.frontends.torch.importer import import_torch
from tests.frontends.test_torch import run


def scaled(x: torch.Tensor, k: float = 3.0, *, options: Any = None, shift: float = float("nan")) -> torch.Tensor:
    y = x * k + (options["bias"] if options else 0)
    return y if shift != shift else y + shift


class Scaled(nn.Module):
    forward = staticmethod(scaled)


@pytest.mark.parametrize(
    ("example", "call", "message"),
    [
        (((2.0,), {}), ((3,), {}), "'k' was 2.0 when the model was compiled, found 3\\n"),
        (((2.0,), {}), ((), {}), "'k' was 2.0 when the model was compiled, found 3.0"),
        (((), {}), ((2.0,), {}), "'k' was not given when the model was compiled, and was 3.0 by default; found 2.0"),
        (((), {}), ((torch.ones(()),), {}), "'k' was not given .* was 3.0 by default; found tensor"),
        (((), {"options": {"bias": 1}}), ((), {"options": {}}), "'options.bias' was 1 .* found none"),
        (((), {"options": {"bias": 1}}), ((), {}), "'options.bias' was 1 .* found none"),
        (
            ((), {}),
            ((), {"options": {"bias": 1}}),
            r"'options.bias' was not given .* compiled; found 1",
        ),
        (((), {"shift": 1.0}), ((), {}), "'shift' was 1.0 .* found nan"),
    ],
)
def test_a_number_unlike_the_examples_is_refused(example: Any, call: Any, message: str) -> None:
    x = torch.ones(5)
    imported = import_torch(Scaled(), (x, *example[0]), example[1])
    with pytest.raises(RunError, match=message):
        imported.flatten((x, *call[0]), call[1])
    torch.testing.assert_close(run(imported, x, *example[0], **example[1]), scaled(x, *example[0], **example[1]))


@pytest.mark.parametrize("left_out", [False, True])
def test_a_number_may_be_left_out_where_it_is_its_default(left_out: bool) -> None:
    x, numbers = torch.ones(5), {"k": 3.0, "options": None, "shift": float("nan")}
    imported = import_torch(Scaled(), (x,), {} if left_out else numbers)
    torch.testing.assert_close(run(imported, x, **(numbers if left_out else {})), x * 3)


class Keeping(nn.Module):
    """Replaces attributes of itself, as `how` says."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how
        self.count, self.history, self.table, self.cache = 0, [], {}, torch.zeros(4)
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x)


def keeping_a_number(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    return x + m.count


def keeping_a_longer_tensor(m: Any, x: torch.Tensor) -> Any:
    y = x + m.cache
    m.cache = torch.cat([x, x])
    return y


def keeping_in_a_list(m: Any, x: torch.Tensor) -> Any:
    m.history.append(x)
    return x + len(m.history)


def keeping_in_a_dict(m: Any, x: torch.Tensor) -> Any:
    return x + m.table.setdefault("first", x)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (keeping_a_number, "'inner.count' while it runs: it was 0, then 1"),
        (keeping_a_longer_tensor, r"'inner.cache' while it runs: it was a tensor of \(4,\), then a tensor of \(8,\)"),
        (keeping_in_a_list, "'inner.history'"),
        (keeping_in_a_dict, "'inner.table'"),
    ],
)
def test_an_attribute_that_the_model_replaces_is_refused(how: Any, name: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeping(how)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) * 2

    model = Outer()
    with pytest.raises(ImportModelError, match=f"replaces its attribute {name}") as raised:
        import_torch(model, (torch.ones(4),))
    assert "register_buffer" in raised.value.hint
    assert (model.inner.count, model.inner.history, model.inner.table) == (0, [], {})


def test_an_attribute_that_is_set_and_read_by_the_next_call_is_refused() -> None:
    def keep(m: Any, x: torch.Tensor) -> Any:
        y = x + getattr(m, "before", 1)
        m.before = 7
        return y

    model = Keeping(keep)
    with pytest.raises(ImportModelError, match="second call gives other results than its first, which sets 'before'"):
        import_torch(model, (torch.ones(4),), check=True)
    assert not hasattr(model, "before")


def test_an_attribute_that_nobody_reads_is_left_out() -> None:
    def keep(m: Any, x: torch.Tensor) -> Any:
        m.last, m.count = x * 2, 0
        return x + 1

    model = Keeping(keep)
    imported = import_torch(model, (torch.ones(4),), check=True)
    assert not hasattr(model, "last")
    torch.testing.assert_close(run(imported, torch.ones(4)), torch.full((4,), 2.0))


def test_a_buffer_that_the_model_assigns_is_state() -> None:
    def keep(m: Any, x: torch.Tensor) -> Any:
        y = x + m.buffer
        m.buffer = x * 2
        return y

    model = Keeping(keep)
    buffer = model.buffer
    imported = import_torch(model, (torch.ones(4),), check=True)
    assert model.buffer is buffer
    assert [i.value.name for i in imported.module.main.inputs if i.role == "state"] == ["buffer"]
