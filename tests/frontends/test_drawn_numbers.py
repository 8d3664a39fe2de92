"""Models that draw from generators of Python or NumPy are refused with the line; those that draw elsewhere are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch import import_torch

DRAWS: dict[str, Callable[[Any], float]] = {
    "Python's random": lambda model: random.random(),
    "numpy.random": lambda model: float(np.random.uniform()),
    "the generator inner.python": lambda model: model.python.random(),
    "the generator inner.numpy": lambda model: float(model.numpy.random()),
    "the generator inner.old": lambda model: float(model.old.rand()),
    f"the generator {__name__}.OF_FILE": lambda model: float(OF_FILE.random()),
}
OF_FILE = np.random.default_rng(3)


class Inner(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(5, 5), draw
        self.python, self.numpy, self.old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        scale = sorted([2.0, self.draw(self)])[0]  # the line
        return y * scale


class Model(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = Inner(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


def line() -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, text in enumerate(file, 1) if "# the line" in text)


@pytest.mark.parametrize("name", DRAWS)
def test_draw_is_refused_with_its_line(name: str) -> None:
    model = Model(DRAWS[name])
    states = random.getstate(), np.random.get_state()[2], model.inner.python.getstate()
    with pytest.raises(ImportModelError, match=f"draws numbers from {name}, which") as caught:
        dr.compile_training(
            model,
            nn.functional.mse_loss,
            optimizer=dr.optim.SGD(0.1),
            example_batch=(torch.randn(3, 5), torch.randn(3, 5)),
        )
    # The draw is in a function of this file that is called from that line.
    place = caught.value.where
    assert place.startswith("test_drawn_numbers.py:")
    assert int(place.rpartition(":")[2]) in (line(), DRAWS[name].__code__.co_firstlineno)
    assert states == (random.getstate(), np.random.get_state()[2], model.inner.python.getstate())


def test_draw_by_the_loss_is_refused() -> None:
    def loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((y - targets) * random.random()).mean()

    with pytest.raises(ImportModelError, match="draws numbers from Python's random") as caught:
        dr.compile_training(nn.Linear(5, 5), loss, optimizer=dr.optim.SGD(0.1), example_batch=(torch.ones(3, 5),) * 2)
    assert caught.value.where.startswith("test_drawn_numbers.py:")


@contextmanager
def nothing() -> Iterator[None]:
    yield


def helper(y: torch.Tensor) -> torch.Tensor:
    with nothing():
        return y.abs()


@pytest.mark.parametrize("draw", [random.random, lambda: random.uniform(0, 1), lambda: random.randint(1, 5)])
@pytest.mark.parametrize("as_metric", [False, True])
def test_line_of_a_draw_after_calls(draw: Callable[[], float], as_metric: bool) -> None:
    """The line also calls functions of torch and of the user, before and after the draw."""

    def loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(y, targets) * helper(y).mean() * draw() * helper(y).mean()  # this one

    def plain(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (y - targets).abs().mean()

    step = lambda: dr.compile_training(  # noqa: E731
        nn.Linear(5, 5), plain if as_metric else loss, optimizer=dr.optim.SGD(0.1),
        example_batch=(torch.ones(3, 5),) * 2, metrics={"drawn": loss} if as_metric else None,
    ).evaluate([(torch.ones(3, 5),) * 2])  # fmt: skip
    with pytest.raises(ImportModelError, match="its loss or a metric draws numbers from Python's random") as caught:
        step()
    lines = (loss.__code__.co_firstlineno + 1, draw.__code__.co_firstlineno if hasattr(draw, "__code__") else 0)
    assert caught.value.where in [f"test_drawn_numbers.py:{number}" for number in lines]


def test_masks_of_transformers_name_their_option() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=12, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embedding_groups=3, num_conv_pos_embeddings=4, layerdrop=0.0,
        feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    model = transformers.Wav2Vec2Model(config).train()
    with pytest.raises(ImportModelError, match=r"draws numbers from numpy\.random") as caught:
        dr.compile_training(
            model, lambda output, targets: output.last_hidden_state.mean() * targets, optimizer=dr.optim.SGD(0.1),
            example_batch=({"input_values": torch.ones(2, 400)}, torch.ones(())),
        )  # fmt: skip
    assert "from_pretrained(..., mask_time_prob=0.0)" in caught.value.hint


def test_generators_that_do_not_advance_are_accepted() -> None:
    model = Model(lambda model: 0.5)
    random.random()
    imported = import_torch(model, (torch.ones(3, 5),))
    assert [op.name for op in imported.module.main.ops][-1] == "add"


def test_draw_of_another_thread_is_not_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it came between the beginning and the end of the export."""
    export = torch.export.export

    def drawing(*args: Any, **kwargs: Any) -> Any:
        random.random()
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", drawing)
    imported = import_torch(Model(lambda model: 0.5), (torch.ones(3, 5),))
    assert [op.name for op in imported.module.main.ops][-1] == "add"
