"""Packed documents on split sequences: each attends to itself alone, as on one device, without a mask of rows by keys.

The probe of huggingface/trl#6843: a token of the first document changes, and no bit of the second one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.frontends.dynamic_shapes import Dim

HEADS, WIDTH, WORDS = 3, 4, 31
LENGTHS: dict[str, list[list[int]]] = {
    "boundaries at the splits": [[7, 6], [5, 4, 4]],
    "boundaries next to the splits": [[6, 7], [8, 5]],
    "one document in a row": [[13], [1, 12]],
    "documents of one token": [[1] * 13, [6, 1, 1, 5]],
}


def positions_of(lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """The numbers of documents, as transformers has them."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


class Packed(nn.Module):
    """Two layers of attention within documents, or a window of them."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.up = nn.ModuleList([nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        documents, row = documents_of(positions), torch.arange(x.shape[1])[:, None]
        key = torch.arange(x.shape[1])
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (key <= row)
        if self.window:
            mask = mask & (key > row - self.window)
        for up, down in zip(self.up, self.down, strict=True):
            q, k, v = up(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + down(z.transpose(1, 2).flatten(2))
        return (x * y).mean()


def has_matrix(plan: dr.Plan, length: int) -> bool:
    """Whether a value of the plan of all devices has a dim for rows, and one for keys."""
    values = [v for f in plan.modules["sharded"].functions for op in f.ops for v in op.results]
    values += [item.value for f in plan.modules["sharded"].functions for item in f.inputs]
    return any(list(v.dtensor.shape).count(length) > 1 for v in values)


TURNS = {2: "S[1: 3|0 + 0|7 + 3|0]", 3: "S[1: 2|0|0 + 0|2|0 + 0|0|4 + 0|2|0 + 3|0|0]"}
"""Cuts of 13 positions of which devices have several parts."""
OPTIONS: dict[str, dict[str, Any]] = {
    "2 devices": {"strategy": "1/1/1/1,context=2"},
    "3 devices": {"strategy": "1/1/1/1,context=3"},
    "2 x 3 devices": {"strategy": "2/1/1/1,context=3,zero=3"},
    "microbatches": {"strategy": "1/1/2/2,context=2"},
    "2 in turns": {"mesh": 2, "shardings": dict.fromkeys(("x", "y", "positions"), TURNS[2])},
    "3 in turns": {"mesh": 3, "shardings": dict.fromkeys(("x", "y", "positions"), TURNS[3])},
}


@pytest.mark.drawn(18)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_training_in_float64_is_that_of_one_process(kind: str, options: str, window: int | None) -> None:
    """One plan trains on packed rows of any lengths."""
    torch.manual_seed(0)
    model = Packed(window).double()
    other = next(lengths for name, lengths in LENGTHS.items() if name != kind)
    batches = [
        (*(torch.randn(2, 13, HEADS * WIDTH, dtype=torch.float64) for _ in range(2)), positions_of(lengths))
        for lengths in (LENGTHS[kind], other)
    ]
    own, losses = deepcopy(model), []
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    for batch in batches:
        optimizer.zero_grad()
        loss = own(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    step = dr.compile_training(model, optimizer=dr.optim.SGD(lr=1.0), example_batch=batches[0], **OPTIONS[options])
    torch.testing.assert_close([step(batch) for batch in batches], losses, rtol=1e-12, atol=1e-12)
    expected = dict(own.named_parameters())
    for name, tensor in step.parameters().items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-12, atol=1e-12)
    assert not has_matrix(step.plan, 13)
    assert "bounded=True" in step.plan.text("sharded")


@pytest.mark.parametrize("options", [{"mesh": 1}, OPTIONS["2 devices"]], ids=["1 device", "2 devices"])
def test_native_kernels_have_bounds_of_each_sample(options: dict[str, Any]) -> None:
    """In float32, with other documents in each recorded step."""
    torch.manual_seed(0)
    model, length = Packed(), 201
    own, optimizer = deepcopy(model), dr.optim.SGD(lr=1.0)
    lengths = [[[100, 101], [1, 200]], [[201], [3] * 67], [[101, 100], [50, 151]]]
    batches = [(*(torch.randn(2, length, HEADS * WIDTH) for _ in range(2)), positions_of(rows)) for rows in lengths]
    step = dr.compile_training(model, optimizer=optimizer, example_batch=batches[0], **options)
    assert not has_matrix(step.plan, length)
    for batch in (*batches, *batches):
        own.zero_grad()
        loss = own(*batch)
        loss.backward()
        assert step(batch) == pytest.approx(loss.item(), abs=2e-6)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter -= parameter.grad  # type: ignore[arg-type]


def test_tvm_has_bounds_of_each_sample() -> None:
    torch.manual_seed(0)
    model = Packed(3).eval()
    batch = (*(torch.randn(2, 13, HEADS * WIDTH) for _ in range(2)), positions_of([[4, 9], [1, 12]]))
    plan = dr.compile(model, batch, mesh=1)
    torch.testing.assert_close(plan(*batch, backend="tvm"), model(*batch), rtol=1e-5, atol=1e-6)


def test_documents_of_any_length() -> None:
    torch.manual_seed(0)
    model = Packed().eval()
    batch = (*(torch.randn(2, 13, HEADS * WIDTH) for _ in range(2)), positions_of([[4, 9], [1, 12]]))
    shapes = {name: {1: Dim("length", min=2, max=64)} for name in ("x", "y", "positions")}
    plan = dr.compile(model, batch, mesh=1, dynamic_shapes=shapes)
    assert "boolean=True" not in plan.text("ranked")
    for length in (13, 20):
        other = [x[:, :1].repeat(1, length, 1) for x in batch[:2]]
        given = (*other, positions_of([[3, length - 3], [length - 1, 1]]))
        torch.testing.assert_close(plan(*given), model(*given), rtol=1e-5, atol=1e-6)


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "numbers that are data": lambda numbers, causal: pairs(numbers) & causal,
    "sums of any numbers": lambda numbers, causal: pairs(numbers.cumsum(-1)) & causal,
    "later keys": lambda numbers, causal: pairs((numbers != 1).cumsum(-1)),
    "two sums": lambda numbers, causal: pairs((numbers != 1).cumsum(-1)) & pairs((numbers != 2).cumsum(-1)) & causal,
    "other documents": lambda numbers, causal: ~pairs((numbers != 1).cumsum(-1)) & causal | torch.eye(13).bool(),
    "sums of the batch": lambda numbers, causal: pairs((numbers != 1).cumsum(0)) & causal,
    "the next row": lambda numbers, causal: pairs((numbers != 1).cumsum(-1), 1) & causal | torch.eye(13).bool(),
    "a sum and its shift": lambda numbers, causal: pairs(starts(numbers), starts(numbers, 1)) & causal,
}


def pairs(numbers: torch.Tensor, other: torch.Tensor | int = 0) -> torch.Tensor:
    of_keys = numbers.roll(other, 1) if isinstance(other, int) else other
    return numbers[:, None, :, None] == of_keys[:, None, None, :]


def starts(numbers: torch.Tensor, more: int = 0) -> torch.Tensor:
    return (numbers != 1).cumsum(-1) + more


@pytest.mark.parametrize("kind", OTHERS)
def test_masks_that_only_look_alike_stay(kind: str) -> None:
    class Model(nn.Module):
        def forward(self, q: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            mask = OTHERS[kind](numbers, torch.ones(13, 13).tril().bool())
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, numbers = torch.randn(2, HEADS, 13, WIDTH), torch.randint(-2, 3, (2, 13))
    plan = dr.compile(Model(), (q, numbers), mesh=1)
    assert "boolean=True" in plan.text("global")
    expected = Model()(q, numbers).nan_to_num()
    torch.testing.assert_close(plan(q, numbers).nan_to_num(), expected, rtol=1e-5, atol=1e-5)


def test_keys_of_packed_documents_are_split() -> None:
    """Bounds of each sample count from the first of a device's keys."""

    class Model(nn.Module):
        def forward(self, k: torch.Tensor, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            documents, row = documents_of(positions), torch.arange(q.shape[2])
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, k, attn_mask=same & (row <= row[:, None]))

    k, q = (torch.randn(2, HEADS, 13, WIDTH, dtype=torch.float64) for _ in range(2))
    for lengths in LENGTHS.values():
        positions = positions_of(lengths)
        plan = dr.compile(Model(), (k, q, positions), mesh=3, shardings={"k": "S[2]"})
        torch.testing.assert_close(plan(k, q, positions), Model()(k, q, positions), rtol=1e-12, atol=1e-12)
        assert any(op.name == "attention_part" for op in plan.modules["distributed"].main.ops)
        assert not has_matrix(plan, 13)


def small_llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, hidden_size=24, intermediate_size=50,
        vocab_size=WORDS, initializer_range=0.3, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


PROBED: dict[str, dict[str, Any]] = {
    "2 devices": {"strategy": "1/1/1/1,context=2"},
    "3 devices": {"strategy": "1/1/1/1,context=3"},
    "2 in turns": {"mesh": 2, "shardings": {"input_ids": TURNS[2]}},
    "3 in turns": {"mesh": 3, "shardings": {"input_ids": TURNS[3]}},
}


def packed_batch(given: str) -> dict[str, torch.Tensor]:
    """Two documents of 6 and 7 tokens, packed by us, whose numbers are in the positions or in a mask."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, WORDS, (n,), generator=generator) for n in (7, 6)]
    batch = dr.pack(documents, 13, mask=given == "mask")
    del batch["document_ids"]
    return batch


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("given", ["positions", "mask"])
@pytest.mark.parametrize("options", PROBED)
def test_a_document_does_not_see_the_one_before_it(options: str, given: str) -> None:
    """A token of the first document changes; logits of the second stay the same to the last bit, those of it alone."""
    model, batch = small_llama().eval(), packed_batch(given)
    labels = batch.pop("labels")
    plan = dr.compile(model, (), batch, **PROBED[options])
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 2] = (changed["input_ids"][0, 2] + 1) % WORDS
    before, after = plan(**batch).logits, plan(**changed).logits
    differs = (before != after).any(-1)[0]
    assert differs.tolist() == [2 <= n < 7 for n in range(13)]
    whole = dr.compile(model, (), batch, mesh=1)(**batch).logits
    torch.testing.assert_close(before, whole, rtol=1e-12, atol=1e-12)
    for part in (slice(0, 7), slice(7, 13)):
        # The norms of this model are float32.
        alone = model(batch["input_ids"][:, part]).logits
        torch.testing.assert_close(before[:, part], alone, rtol=1e-5, atol=1e-5)
    assert labels[0, 7] == -100
    if given == "positions":
        assert not has_matrix(plan, 13)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("given", ["positions", "mask"])
@pytest.mark.parametrize("options", PROBED)
def test_the_loss_of_a_document_does_not_see_the_one_before_it(options: str, given: str) -> None:
    """Of a training whose labels are those of the second document; all gradients are those of it alone."""
    batch = packed_batch(given)
    batch["labels"][:, :8] = -100
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, :7] = 3
    second = {"input_ids": batch["input_ids"][:, 7:], "labels": batch["labels"][:, 7:]}
    optimizer, found = dr.optim.SGD(lr=1.0), list[tuple[float, dict[str, torch.Tensor]]]()
    for data in (batch, changed):
        step = dr.compile_training(small_llama(), optimizer=optimizer, example_batch=batch, **PROBED[options])
        found.append((float(step(data)), step.parameters()))
    assert found[0][0] == found[1][0]
    alone = small_llama()
    loss = alone(**second).loss
    loss.backward()
    assert found[0][0] == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in alone.named_parameters():
        expected = parameter.detach() - (0 if parameter.grad is None else parameter.grad)
        for _, parameters in found:
            torch.testing.assert_close(parameters[name], expected, rtol=1e-6, atol=1e-6)
