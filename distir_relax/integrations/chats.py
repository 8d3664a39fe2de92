"""Conversations as training data: tokens by the model's chat template; the assistant's are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.packing import IGNORED, attention_mask, pack
from distir_relax.support import parse_json, read_text
from distir_relax.text import Tokenizer

if TYPE_CHECKING:
    import torch

_MOST = 1 << 32
"""The largest file that is read, in bytes."""
Chat = Sequence[dict[str, Any]]
"""Messages with a ``role`` and a ``content``."""


def read_chats(path: str | Path) -> list[Chat]:
    """Return the conversations of a file of JSON lines: each a list of messages, or an object with ``messages``.

    Raises RunError with the line for one that is neither, or has no message of the assistant, and for an empty file.
    """
    chats: list[Chat] = []
    for number, line in enumerate(read_text(path, RunError, _MOST).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        found = parse_json(line, RunError, where)
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RunError(
                'expected a list of messages, or {"messages": [...]}', where,
                'such as {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}',
            )  # fmt: skip
        if not any(message.get("role") == "assistant" for message in messages):
            raise RunError("expected a message of the assistant, which is what is learned, found none", where)
        chats.append(messages)
    if not chats:
        raise RunError("expected conversations, found none", str(path))
    return chats


class ChatRows:
    """A data set of conversations in rows of `length` tokens: ``input_ids`` and ``labels``, int64 ``(length,)``.

    Rows end with `pad`, and labels are `IGNORED` but for the assistant's tokens. `length` is at most that of the
    longest row, rounded up to a multiple of 8, unless rows are `padded` to the length given. There are `chats`
    conversations; longer ones are cut, `cut` counts them.

    In `packed` rows there are several conversations, with ``position_ids`` from 0 on in each, and an
    ``attention_mask`` (bool ``(1, length, length)``): tokens attend to those of their own.

    Raises RunError if no row has a label, and for a template that writes earlier messages in another way once there are
    later ones.
    """

    def __init__(
        self, chats: Sequence[Chat], tokenizer: Tokenizer, length: int, pad: int = 0, packed: bool = False,
        padded: bool = False,
    ) -> None:  # fmt: skip
        tokens = [tokenizer.encode_replies(chat) for chat in chats]
        sizes = [len(ids) for ids, _ in tokens]
        most = length if padded else -(-(sum(sizes) if packed else max(sizes)) // 8) * 8
        self.length = min(length, most)
        self.cut = sum(size > self.length for size in sizes)
        kept = [(ids[: self.length], learned[: self.length]) for ids, learned in tokens]
        kept = [(ids, learned) for ids, learned in kept if any(learned)]
        self.chats = len(kept)
        if not kept:
            raise RunError(f"no conversation has a token of the assistant among its first {length}", "length")
        ids, labels = zip(*((ids, _labels(ids, learned)) for ids, learned in kept), strict=True)
        self._rows = _packed(ids, labels, self.length, pad) if packed else _padded(ids, labels, self.length, pad)

    def __len__(self) -> int:
        return len(self._rows["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: rows[index] for name, rows in self._rows.items()}
        documents = row.pop("document_ids", None)
        return row if documents is None else {**row, "attention_mask": attention_mask(documents[None])[0]}


def _labels(ids: Sequence[int], learned: Sequence[bool]) -> list[int]:
    # The first token follows nothing.
    return [
        token if is_learned and place else IGNORED
        for place, (token, is_learned) in enumerate(zip(ids, learned, strict=True))
    ]


def _padded(
    ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], length: int, pad: int
) -> dict[str, torch.Tensor]:
    """Return a row for each conversation."""
    import torch

    filled = {"input_ids": (ids, pad), "labels": (labels, IGNORED)}
    return {
        name: torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows])
        for name, (rows, fill) in filled.items()
    }


def _packed(
    ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], length: int, pad: int
) -> dict[str, torch.Tensor]:
    """Return rows of several conversations each, and the number of the conversation of each token."""
    rows = pack(ids, length, pad=pad)
    # Labels of as many tokens are packed in the same way.
    return {**rows, "labels": pack(labels, length, pad=IGNORED)["input_ids"]}
