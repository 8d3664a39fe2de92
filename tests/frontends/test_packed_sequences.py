"""Packed sequences: recurrent layers that take them give what torch gives, on ranks and in training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import distir_relax as dr
from distir_relax.errors import ImportModelError

N, T, WIDTH, H = 6, 7, 3, 4
LENGTHS = torch.tensor([3, 7, 1, 5, 2, 7])
LAYERS = [
    (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (torch.nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    (torch.nn.GRU, {"bidirectional": True, "bias": False}),
    (torch.nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


class Tagger(torch.nn.Module):
    """Scores at each position, zero past the end, and the last states."""

    def __init__(self, kind: Any, options: dict[str, Any], batch_first: bool = True, padding: float = 0.0) -> None:
        super().__init__()
        self.layer, self.batch_first, self.padding = (
            kind(WIDTH, H, batch_first=batch_first, **options),
            batch_first,
            padding,
        )
        self.head = torch.nn.LazyLinear(5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, *states: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=False)
        outputs, last = self.layer(packed, states[0] if states else None)
        y, found = pad_packed_sequence(outputs, self.batch_first, self.padding, x.shape[1 if self.batch_first else 0])
        return self.head(y), y, found, *(last if isinstance(last, tuple) else [last])


def tagger(kind: Any, options: dict[str, Any], **others: Any) -> Tagger:
    torch.manual_seed(0)
    model = Tagger(kind, options, **others)
    shape = (N, T, WIDTH) if model.batch_first else (T, N, WIDTH)
    model(torch.zeros(shape), torch.full((N,), T))
    return model


@pytest.mark.parametrize(("kind", "options"), LAYERS)
@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/2/1/1"])
def test_layers_give_what_torch_gives(kind: Any, options: dict[str, Any], strategy: str) -> None:
    model, x = tagger(kind, options), torch.randn(N, T, WIDTH)
    plan = dr.compile(model, (x, LENGTHS), strategy=strategy)
    for lengths in (LENGTHS, torch.tensor([2, 1, 4, 3, 3, 1])):
        for found, expected in zip(plan(x, lengths), model(x, lengths), strict=True):
            torch.testing.assert_close(found, expected)


def test_states_and_padding_and_the_length_first() -> None:
    model = tagger(torch.nn.GRU, {"num_layers": 2}, batch_first=False, padding=-2.5)
    x, states = torch.randn(T, N, WIDTH), torch.randn(2, N, H)
    plan = dr.compile(model, (x, LENGTHS, states), strategy="1/1/1/1")
    for found, expected in zip(plan(x, LENGTHS, states), model(x, LENGTHS, states), strict=True):
        torch.testing.assert_close(found, expected)


def test_any_number_of_samples_of_any_length() -> None:
    model, x = tagger(*LAYERS[0]), torch.randn(N, T, WIDTH)
    n, t = torch.export.Dim("n", min=1, max=64), torch.export.Dim("t", min=1, max=64)
    dims = {"x": {0: n, 1: t}, "lengths": {0: n}}
    plan = dr.compile(model, (x, LENGTHS), strategy="3/1/1/1", dynamic_shapes=dims)
    for count, length in ((1, 1), (5, 11), (7, 3)):
        inputs = torch.randn(count, length, WIDTH), torch.randint(1, length + 1, (count,))
        for found, expected in zip(plan(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_batch_that_is_split_needs_no_communication() -> None:
    model, x = tagger(*LAYERS[0]), torch.randn(N, T, WIDTH)
    plan = dr.compile(model, (x, LENGTHS), mesh=3, shardings={"x": "S[0]"})
    body = plan.text("distributed").partition("return")[0]
    assert not any(f" {name}(" in body for name in ("all_gather", "all_reduce", "all_to_all", "send"))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=1", "1/1/2/3"])
@pytest.mark.parametrize(("kind", "options"), LAYERS[:3])
def test_training_is_torch_s(kind: Any, options: dict[str, Any], strategy: str) -> None:
    """Positions past the end have no part in the loss, and the gradient of the states is that of the last step."""
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = tagger(kind, options)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scores, _, _, last, *_ = self.tagger(x, lengths)
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100) + last.square().mean()

    labels = torch.randint(5, (N, T)).masked_fill(torch.arange(T) >= LENGTHS[:, None], -100)
    model = Model().double()
    batch = (torch.randn(N, T, WIDTH, dtype=torch.float64), LENGTHS, labels)
    theirs, losses = deepcopy(model), []
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    step = dr.compile_training(model, optimizer=dr.optim.SGD(0.1), example_batch=batch, strategy=strategy)
    assert [step(batch) for _ in range(3)] == pytest.approx(losses, rel=1e-9)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-8, atol=1e-10)


def test_lengths_that_the_model_knows() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.GRU(WIDTH, H)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs, _ = self.layer(pack_sequence([x[:5], x[:3], x[1:2]]))
            return pad_packed_sequence(outputs)[0]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(T, WIDTH)
    torch.testing.assert_close(dr.compile(model, (x,), strategy="1/1/1/1")(x), model(x))


class Refused(torch.nn.Module):
    """Uses a packed sequence as no recurrent layer does."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use, self.layer = use, torch.nn.LSTM(WIDTH, H, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.use(self.layer, packed, x)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda layer, packed, x: layer(packed)[0].data.sum(), r"\.sum is read of a packed sequence"),
        (lambda layer, packed, x: F.relu(packed.data), "relu takes a packed sequence"),
        (
            lambda layer, packed, x: layer(PackedSequence(x[0], torch.ones(T, dtype=torch.int64)))[0].data,
            "parts of its own are given to a packed sequence",
        ),
        (
            lambda layer, packed, x: pad_packed_sequence(layer(packed)[0])[0],
            "pad_packed_sequence gives a tensor whose length",
        ),
    ],
)
def test_other_uses_are_refused_with_their_line(use: Any, words: str) -> None:
    with pytest.raises(ImportModelError, match=words) as caught:
        dr.compile(Refused(use), (torch.randn(N, T, WIDTH), LENGTHS), strategy="1/1/1/1")
    assert "test_packed_sequences.py" in str(caught.value)


def test_torch_is_as_before() -> None:
    """Also after a model that was refused."""
    x = torch.randn(N, T, WIDTH)
    with pytest.raises(ImportModelError):
        dr.compile(Refused(lambda layer, packed, x: packed.data + 1), (x, LENGTHS), strategy="1/1/1/1")
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    assert packed.data.shape == (int(LENGTHS.sum()), WIDTH)
    assert pad_packed_sequence(torch.nn.GRU(WIDTH, H)(packed)[0])[0].shape == (T, N, H)
