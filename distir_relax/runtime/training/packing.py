"""Packing: documents of different lengths in rows of one length, for language models."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of tokens that are not predicted, as for `torch.nn.functional.cross_entropy`."""


def pack(
    documents: Iterable[Sequence[int] | torch.Tensor], length: int, *, pad: int = 0, mask: bool = False
) -> dict[str, torch.Tensor]:
    """Pack the tokens of documents into rows of `length`, few of them: each into the fullest row with room for it.

    The longest documents come first (best-fit decreasing). One of more than `length` tokens is cut into several. The
    result has int64 tensors of shape ``(rows, length)`` by the names that transformers models give their inputs:

    ================  =======================================================================================
    input_ids         tokens, and `pad` after the last document of a row
    labels            tokens to predict; `IGNORED` for the first token of each document, and for padding
    position_ids      positions within the document, from 0 on
    document_ids      the number of the document in its row, from 1 on; 0 for padding
    attention_mask    with `mask` alone: bool ``(rows, 1, length, length)``, whether a token (dim 2) attends to another
                      one, an earlier one of its own document or itself
    ================  =======================================================================================

    Raises RunError for a length below 1, and for documents that are not sequences of whole numbers.
    """
    import torch

    if length < 1:
        raise RunError(f"expected rows of at least 1 token, found {length}", "pack")
    pieces = [
        piece for n, item in enumerate(documents) for piece in torch.split(_tokens(item, n), length) if len(piece)
    ]
    rows = _fit([len(piece) for piece in pieces], length)
    kept = {name: torch.zeros(len(rows), length, dtype=torch.int64) for name in ("position_ids", "document_ids")}
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.int64)
    for row, numbers in enumerate(rows):
        start = 0
        for document, number in enumerate(numbers, 1):
            end = start + len(pieces[number])
            ids[row, start:end] = pieces[number]
            labels[row, start + 1 : end] = pieces[number][1:]
            kept["position_ids"][row, start:end] = torch.arange(end - start)
            kept["document_ids"][row, start:end] = document
            start = end
    packed = {"input_ids": ids, "labels": labels, **kept}
    return packed | {"attention_mask": attention_mask(kept["document_ids"])} if mask else packed


def attention_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return whether a position attends to another one, bool ``(rows, 1, length, length)``.

    `documents` are the numbers of the documents of each position, ``(rows, length)``. Padding attends to earlier
    padding and itself.
    """
    import torch

    length = documents.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


def _tokens(document: Any, number: int) -> torch.Tensor:
    import torch

    try:
        tokens = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.zeros(0, 0, dtype=torch.float32)
    if not tokens.numel() and tokens.dim() == 1:
        return tokens.long()
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        shown = repr(document)
        raise RunError(
            f"expected a sequence of tokens, which are whole numbers, found {shown if len(shown) < 60 else shown[:57]}",
            f"document {number}",
        )
    return tokens.long()


def _fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return the numbers of the pieces in each row: the longest first, each in the row with the least room for it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect_left(free, (lengths[number], -1))
        room, row = free.pop(place) if place < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        insort(free, (room - lengths[number], row))
    return rows
