"""Incremental forms of single ops, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan

import distir_relax as dr
from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.incremental import Incremental
from distir_relax.interpret.causality import check_causality
from distir_relax.ir import CachedState
from distir_relax.ops import TABLE
from tests.incremental.chunks import cuts, derived, in_chunks

LENGTH = 11
DIMS = {"x": {0: "batch", 1: dr.Dim("sequence", max=64)}}
FROM_FOUR = {"x": {0: "batch", 1: dr.Dim("sequence", min=4, max=64)}}


class Uses(torch.nn.Module):
    """Runs a function on its input."""

    def __init__(self, use: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(x)


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    heads = x.unflatten(2, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * 0.5, heads + 1, **options).transpose(1, 2)


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])


def distances(x: torch.Tensor) -> torch.Tensor:
    return (positions(x)[:, None] - positions(x)[None, :]).float()


def windowed(x: torch.Tensor) -> torch.Tensor:
    return (distances(x) >= 0) & (distances(x) < 3)


def weights(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape)


def convolution(
    x: torch.Tensor, kernel: int, pads: tuple[int, int], value: float = 0.0, **options: Any
) -> torch.Tensor:
    weight = weights(6, 6 // options.get("groups", 1), kernel)
    return F.conv1d(F.pad(x.mT, pads, value=value), weight, **options).mT


class Recurrent(torch.nn.Module):
    """A recurrent layer of torch, over (batch, sequence, 6); its state begins with `begin` if there is one."""

    def __init__(self, kind: str, begin: float | None = None, **options: Any) -> None:
        super().__init__()
        self.kind, self.begin = kind, begin
        self.layer = getattr(torch.nn, kind)(6, 5, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.begin is None:
            return self.layer(x)[0]
        begin = torch.full((self.layer.num_layers, x.shape[0], 5), self.begin)
        return self.layer(x, (begin, begin * 2) if self.kind == "LSTM" else begin)[0]


def linear_recurrence(x: torch.Tensor) -> torch.Tensor:
    """``y[t] = a[t] y[t - 1] + b[t]`` as state-space models write it."""
    pairs = associative_scan(
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (x.sigmoid(), x), dim=1,
        combine_mode="generic",
    )  # fmt: skip
    return pairs[1]  # type: ignore[no-any-return]


CAUSAL: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "pointwise": (lambda x: torch.tanh(x) * 2, 0),
    "positions": (lambda x: x + positions(x)[:, None] * 0.1, 0),
    "positions in steps of 3": (lambda x: x + torch.arange(1, 3 * x.shape[1], 3)[:, None], 0),
    "the sequence flattened with the batch": (lambda x: F.silu(x.reshape(-1, 6) @ torch.eye(6)).reshape(x.shape), 0),
    "cumulative sum": (lambda x: x.cumsum(1), 1),
    "cumulative sum of a cumulative sum": (lambda x: (x.cumsum(1) * x).cumsum(1).cumsum(2), 2),
    "cumulative log-sum-exp": (lambda x: (x * 50).logcumsumexp(1), 2),
    "cumulative product": (lambda x: x.cumprod(1), 2),
    "linear recurrence": (linear_recurrence, 1),
    "cumulative sum of positions": (lambda x: x + positions(x).cumsum(0)[:, None], 0),
    "causal attention": (lambda x: attention(x, is_causal=True), 2),
    "masked attention": (lambda x: attention(x, attn_mask=windowed(x)), 2),
    "biased attention": (
        lambda x: attention(x, attn_mask=torch.where(windowed(x), distances(x) * -0.2, -torch.inf)), 2,
    ),
    "attention by hand": (
        lambda x: (x @ x.transpose(1, 2)).masked_fill(~windowed(x), -torch.inf).softmax(2) @ x, 1,
    ),
    "convolution of a padded sequence": (lambda x: convolution(x, 3, (2, 0)), 1),
    "dilated": (lambda x: convolution(x, 4, (9, 0), dilation=3), 1),
    "depthwise, cut to the sequence": (lambda x: convolution(x, 4, (0, 0), groups=6, padding=3)[:, : x.shape[1]], 1),
    "padded with ones": (lambda x: convolution(x, 3, (2, 0), value=1.0), 1),
    "of a convolution": (lambda x: convolution(convolution(x, 3, (2, 0)).relu(), 2, (1, 0)), 2),
    "padded with too much": (lambda x: convolution(x, 3, (5, 0))[:, 2:-1], 1),
    "of two dims": (
        lambda x: F.conv2d(x[:, None], weights(1, 1, 3, 2), padding=(2, 1))[:, 0, : x.shape[1], :6], 1,
    ),
    "of three dims": (
        lambda x: F.conv3d(x[:, None, :, None], weights(1, 1, 3, 1, 1), padding=(2, 0, 0))[:, 0, : x.shape[1], 0], 1,
    ),
    "shift by padding": (lambda x: x * 0.5 + F.pad(x, (0, 0, 1, 0))[:, :-1], 1),
    "shift by padding and cropping": (lambda x: x * 0.5 + F.pad(x, (0, 0, 3, -3)), 1),
    "shift by concatenation": (lambda x: torch.cat([x.new_zeros(x.shape[0], 1, 6), x[:, :-1]], 1) - x, 1),
    "shift with first positions": (
        lambda x: torch.cat([weights(1, 2, 6).expand(x.shape[0], 2, 6), x[:, :-2]], 1) - x, 1,
    ),
    "a token before, and one after": (
        lambda x: torch.cat([x[:, :1] * 0 + weights(2, 6), x, x[:, :1]], 1)[:, 1 : x.shape[1] + 1], 2,
    ),
    "differences": (lambda x: F.pad((x[:, 1:] - x[:, :-1]).exp(), (0, 0, 1, 0)), 1),
    "differences of positions": (lambda x: x + F.pad(positions(x).float(), (1, 0))[1:, None] * x, 0),
    "attention to the token before": (
        lambda x: attention(F.pad(x, (0, 0, 1, 0))[:, :-1], is_causal=True), 3,
    ),
    "distances to what was there": (
        lambda x: ((x[:, :, None] - x[:, None]).square() * (distances(x) >= 0)[..., None]).sum(2), 1,
    ),
}  # fmt: skip


CUT = {"shift by concatenation", "shift with first positions", "differences"}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_give_the_whole(name: str) -> None:
    use, states = CAUSAL[name]
    torch.manual_seed(0)
    model = Uses(use)
    # torch exports dims of one position less for lengths of at least three.
    imported = import_torch(model, (torch.randn(2, 9, 6),), dynamic_shapes=FROM_FOUR if name in CUT else DIMS)
    check_causality(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    assert sum(isinstance(record, CachedState) for record in module.records) == states
    x = torch.randn(3, LENGTH, 6)
    expected = model(x)
    for seed in range(10):
        found = in_chunks(module, imported, {"x": x}, cuts(LENGTH, seed))
        torch.testing.assert_close(found["output"], expected, rtol=1e-5, atol=1e-5)


RECURRENT: dict[str, tuple[Recurrent, int]] = {
    "LSTM": (Recurrent("LSTM"), 2),
    "LSTM of two layers": (Recurrent("LSTM", num_layers=2), 4),
    "LSTM with projections": (Recurrent("LSTM", proj_size=3), 2),
    "LSTM with an initial state": (Recurrent("LSTM", 0.3), 2),
    "GRU": (Recurrent("GRU"), 1),
    "GRU with an initial state": (Recurrent("GRU", -0.7, num_layers=2), 2),
    "RNN": (Recurrent("RNN", 0.5, nonlinearity="relu"), 1),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_begin_with_the_last_state(name: str) -> None:
    model, states = RECURRENT[name]
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.7, 0.7)
    imported = import_torch(model, (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    check_causality(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    assert [r.grows for r in module.records if isinstance(r, CachedState)] == [False] * states
    x = torch.randn(3, LENGTH, 6)
    for seed in range(6):
        found = in_chunks(module, imported, {"x": x}, cuts(LENGTH, seed))
        torch.testing.assert_close(found["output"], model(x).detach(), rtol=1e-5, atol=1e-6)


BOTH_DIRECTIONS = Recurrent("LSTM", bidirectional=True)


class CrossAttention(torch.nn.Module):
    """Attends to the states of an encoder, besides the tokens before."""

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        y = x + attention(x, is_causal=True).flatten(2)
        keys = (encoded @ weights(6, 6)).unflatten(2, (2, 3)).transpose(1, 2)
        queries = y.unflatten(2, (2, 3)).transpose(1, 2)
        return y + F.scaled_dot_product_attention(queries, keys, keys.tanh()).transpose(1, 2).flatten(2)


def test_an_input_of_another_length_is_the_same_in_each_call() -> None:
    model, dims = CrossAttention(), {**DIMS, "encoded": {0: "batch", 1: dr.Dim("frames", max=99)}}
    imported = import_torch(model, (torch.randn(2, 9, 6), torch.randn(2, 5, 6)), dynamic_shapes=dims)
    check_causality(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    # Keys and values of the sequence; those of the encoder's states are computed in each call.
    assert sum(isinstance(record, CachedState) for record in module.records) == 2
    x, encoded = torch.randn(3, LENGTH, 6), torch.randn(3, 7, 6)
    for seed in range(4):
        found = in_chunks(module, imported, {"x": x}, cuts(LENGTH, seed), whole={"encoded": encoded}, frames=7)
        torch.testing.assert_close(found["output"], model(x, encoded), rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "flip": (lambda x: x.flip(1), "flip"),
    "softmax": (lambda x: x.softmax(1), "nn.softmax"),
    "roll": (lambda x: x.roll(1, 1), "split"),
    "convolution with a stride": (
        lambda x: F.conv1d(F.pad(x.mT, (2, 0)), torch.ones(6, 6, 3), stride=2).mT,
        "nn.conv1d",
    ),
    "slice with a step": (lambda x: x[:, ::2], "strided_slice"),
    "concatenation with two sequences": (lambda x: torch.cat([x, x * 2, x[:, :1]], 1), "concat"),
    "cumulative sum of a padded sequence": (lambda x: F.pad(x, (0, 0, 1, 0)).cumsum(1)[:, 1:], "cumsum"),
    "LSTM in both directions": (BOTH_DIRECTIONS, "nn.lstm"),
    "sort": (lambda x: x.sort(1).values, "argsort"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_refused_with_its_line(name: str) -> None:
    use, op = REFUSED[name]
    imported = import_torch(Uses(use), (torch.randn(2, 9, 6),), dynamic_shapes=FROM_FOUR)
    with pytest.raises(
        UnsupportedOpError, match=rf"^(use\.layer, )?test_derive\.py:\d+: {op} mixes positions along sequence"
    ):
        Incremental().run(imported.module)


BOTH_WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attention without a mask": (attention, "nn.scaled_dot_product_attention"),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "mean"),
    "the next": (lambda x: attention(x, attn_mask=distances(x) >= -1), "nn.scaled_dot_product_attention"),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_depends_on_later_positions_is_refused(name: str) -> None:
    use, op = BOTH_WAYS[name]
    imported = import_torch(Uses(use), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    message = rf"^test_derive\.py:\d+: {op} makes positions along sequence depend on later ones"
    with pytest.raises(UnsupportedOpError, match=message):
        check_causality(imported.module, imported.tensors, "sequence")


def test_an_output_of_another_length_is_refused() -> None:
    imported = import_torch(Uses(lambda x: F.pad(x, (0, 0, 1, 0))), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    with pytest.raises(DistIRError, match=r"one position for each of sequence, found output .*sequence \+ 1, 6\]"):
        Incremental().run(imported.module)


def test_a_program_without_the_size() -> None:
    imported = import_torch(Uses(torch.tanh), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    with pytest.raises(DistIRError, match="the program has no size 'tokens'\n  hint: its sizes are batch, sequence"):
        Incremental("tokens").run(imported.module)
    with pytest.raises(DistIRError, match="no size 'tokens'"):
        check_causality(imported.module, imported.tensors, "tokens")


def test_every_incremental_form_is_run() -> None:
    assert {entry.name for entry in TABLE.entries() if entry.incremental} == {
        "arange", "concat", "cumprod", "cumsum", "linear_scan", "logcumsumexp", "nn.conv1d", "nn.conv2d", "nn.conv3d",
        "nn.gru", "nn.lstm", "nn.rnn", "nn.scaled_dot_product_attention", "pad", "strided_slice",
    }  # fmt: skip
