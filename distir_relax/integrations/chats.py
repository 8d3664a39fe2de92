"""Conversations as training data: tokens by the model's chat template; the assistant's are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.packing import IGNORED
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

    Rows end with `pad`, and labels are `IGNORED` but for the assistant's tokens. Longer conversations are cut, `cut`
    counts them. Raises RunError if no row has a label, and for a template that writes earlier messages in another way
    once there are later ones.
    """

    def __init__(self, chats: Sequence[Chat], tokenizer: Tokenizer, length: int, pad: int = 0) -> None:
        rows = [tokenizer.encode_replies(chat) for chat in chats]
        self.length = min(length, -(-max(len(ids) for ids, _ in rows) // 8) * 8)
        self.cut = sum(len(ids) > self.length for ids, _ in rows)
        kept = [(ids[: self.length], learned[: self.length]) for ids, learned in rows]
        self._rows = [(ids, learned) for ids, learned in kept if any(learned)]
        self._pad = pad
        if not self._rows:
            raise RunError(f"no conversation has a token of the assistant among its first {length}", "length")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch

        ids, learned = self._rows[index]
        rest = self.length - len(ids)
        labels = [token if is_learned else IGNORED for token, is_learned in zip(ids, learned, strict=True)]
        return {
            "input_ids": torch.tensor([*ids, *[self._pad] * rest]),
            "labels": torch.tensor([*labels, *[IGNORED] * rest]),
        }
