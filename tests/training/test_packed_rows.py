"""Documents of different lengths: packed into rows, and in batches of different lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import TensorDataset

import distir_relax as dr
from distir_relax.errors import RunError
from tests.training import observers

WORDS, LENGTH = 127, 13


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=24, intermediate_size=60, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


def documents(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]


FIRST = 5, 3, 11, 7, 2, 13, 4, 6, 9, 8
SECOND = 4, 4, 5, 3, 10, 6, 7, 13, 1, 9, 12


def test_every_token_is_in_one_row() -> None:
    found = documents(*FIRST, 31, 1)
    packed = dr.pack(found, LENGTH, pad=WORDS, mask=True)
    # 31 tokens make pieces of 13, 13 and 5; rows without more room than a row has.
    pieces = sorted(tuple(part.tolist()) for d in found for part in d.split(LENGTH))
    own = []
    rows = zip(*(packed[name] for name in packed), strict=True)
    for ids, labels, positions, numbers, mask in rows:
        for number in range(1, int(numbers.max()) + 1):
            (places,) = (numbers == number).nonzero(as_tuple=True)
            assert places.tolist() == list(range(int(places[0]), int(places[-1]) + 1))
            own.append(tuple(ids[places].tolist()))
            assert positions[places].tolist() == list(range(len(places)))
            assert labels[places].tolist() == [-100, *ids[places[1:]].tolist()]
            expected = torch.zeros(len(places), LENGTH, dtype=torch.bool)
            for i in range(len(places)):
                expected[i, places[: i + 1]] = True
            assert torch.equal(mask[0, places], expected)
        empty = numbers == 0
        assert set(ids[empty].tolist()) <= {WORDS}
        assert set(labels[empty].tolist()) <= {-100}
    assert sorted(own) == pieces
    assert len(packed["input_ids"]) == -(-sum(map(len, found)) // LENGTH)
    assert dr.pack([], LENGTH)["input_ids"].shape == (0, LENGTH)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "names"), [("3/1/1/1", ("position_ids",)), ("1/2/1/2", ("position_ids", "attention_mask"))]
)
def test_packed_rows_have_the_loss_of_the_documents(strategy: str, names: tuple[str, ...]) -> None:
    """Two batches of 6 rows, packed differently; losses are means over predicted tokens."""
    batches = []
    for lengths in (FIRST, SECOND):
        packed = dr.pack(documents(*lengths), LENGTH, mask=True)
        batches.append({name: packed[name] for name in ("input_ids", "labels", *names)})
    step = dr.compile_training(
        model(), optimizer=dr.optim.SGD(0.5), example_batch=batches[0], strategy=strategy, gradient_norm=True
    )
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for batch, lengths in zip(batches, (FIRST, SECOND), strict=True):
        found = documents(*lengths)
        count = sum(len(d) - 1 for d in found)
        optimizer.zero_grad()
        losses = [own(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in found if len(d) > 1]
        loss = sum(losses) / count
        loss.backward()
        assert step(batch) == pytest.approx(loss.item(), rel=1e-6)
        expected = torch.nn.utils.clip_grad_norm_(own.parameters(), float("inf")).item()
        assert step.gradient_norm == pytest.approx(expected, rel=1e-5)
        optimizer.step()
    torch.testing.assert_close(step.parameters(), dict(own.named_parameters()), rtol=1e-5, atol=1e-6)


def test_rows_are_a_data_set() -> None:
    packed = dr.pack(documents(*FIRST, *SECOND), LENGTH)
    names = ("input_ids", "labels", "position_ids")
    samples = TensorDataset(*(packed[name] for name in names))
    example = {name: packed[name][:3] for name in names}
    step = dr.compile_training(
        model(), optimizer=dr.optim.AdamW(0.01), example_batch=example, strategy="3/1/1/1", metrics={}
    )
    calls = observers.Calls()
    dr.train(step, samples, steps=4, callbacks=[calls], evaluation=samples)
    assert calls.metrics[4]["loss"] < calls.results[0].loss


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/2/2/2"])
def test_batches_of_different_lengths_are_trained(strategy: str) -> None:
    """Sequences of 3 to 31 tokens, 2 to 6 of them: one program, whose dims are symbolic."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for rows, length in ((6, 9), (6, 13), (5, 3), (6, 31), (2, 8)):
        ids = torch.randint(0, WORDS, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, :2] = -100
        batches.append({"input_ids": ids, "labels": labels})
    dims = {0: dr.Dim("batch"), 1: dr.Dim("length", min=2, max=64)}
    step = dr.compile_training(
        model(), optimizer=dr.optim.AdamW(0.01), example_batch=batches[0], strategy=strategy,
        dynamic_shapes={"input_ids": dims, "labels": dims},
    )  # fmt: skip
    calls = observers.Calls()
    dr.train(step, batches, steps=5, callbacks=[calls])
    own, losses = copy.deepcopy(model()), []
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss = own(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [result.loss for result in calls.results] == pytest.approx(losses, rel=1e-5)
    assert [result.work for result in calls.results] == [b["input_ids"].numel() for b in batches]


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([[1, 2]], 0, "expected rows of at least 1 token, found 0"),
        ([[1, 2], "text"], 4, r"document 1: expected a sequence of tokens, which are whole numbers, found 'text'"),
        ([[0.5, 1.0]], 4, "document 0: expected a sequence of tokens"),
        ([torch.ones(2, 3, dtype=torch.int64)], 4, "document 0: expected a sequence of tokens"),
    ],
    ids=["length", "text", "floats", "matrix"],
)
def test_documents_that_cannot_be_packed(documents: list[Any], length: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        dr.pack(documents, length)
