"""Packed sequences of a model: `torch.export` cannot capture them, as their sizes depend on the lengths.

While a model is exported they are padded sequences with their lengths, which recurrent layers take as one op; values
past the end of a sequence change no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_here
from distir_relax.support.torch_compat import graph_op

if TYPE_CHECKING:
    import torch


@contextmanager
def padded_sequences() -> Iterator[None]:
    """Let `torch.export` capture packed sequences and the recurrent layers that take them within the context."""
    import torch
    from torch.nn.utils import rnn

    with ExitStack() as stack:
        # Models import the functions by name, so their code is replaced.
        forms = {rnn.pack_padded_sequence: _pack, rnn.pack_sequence: _pack_several, rnn.pad_packed_sequence: _unpack}
        for function, form in forms.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = form.__code__
        for layer in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
            stack.enter_context(patch.object(layer, "forward", _forward_of(layer.forward)))
        yield


@dataclass(frozen=True, eq=False)
class Padded:
    """Stands for each part of a packed sequence: `x` is (t, n, i), and `lengths` (n)."""

    x: torch.Tensor
    lengths: torch.Tensor
    longest: int | None
    """The largest length, where all are numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `ImportModelError`: only recurrent layers take it."""
        raise _refused(f"{getattr(func, '__name__', func)} takes")

    def __getattr__(self, name: str) -> Any:
        """Raise `ImportModelError`, as for a tensor whose size depends on data."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(f".{name} is read of")


def pack(x: torch.Tensor, lengths: Any, batch_first: bool) -> Any:
    """Stand in for torch's ``pack_padded_sequence``; rows need no order by length."""
    import torch
    from torch.nn.utils.rnn import PackedSequence

    longest = None
    if not isinstance(lengths, torch.Tensor):
        longest = max(lengths) if all(isinstance(length, int) for length in lengths) else None
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    padded = Padded(x.transpose(0, 1) if batch_first else x, lengths.to(torch.int64), longest)
    return PackedSequence._make([padded] * 4)


def pack_several(sequences: Sequence[torch.Tensor]) -> Any:
    """Stand in for torch's ``pack_sequence``."""
    import torch
    import torch.nn.functional as F

    lengths = [len(x) for x in sequences]
    rows = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, max(lengths) - len(x))) for x in sequences]
    return pack(torch.stack(rows, 1), lengths, False)


def unpack(packed: Any, batch_first: bool, value: float, total: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for torch's ``pad_packed_sequence``; raise `ImportModelError` where its length depends on data."""
    import torch
    import torch.nn.functional as F

    padded = packed[0]
    if not isinstance(padded, Padded):
        raise _refused("parts of its own are given to")
    total = padded.longest if total is None else total
    if total is None:
        raise ImportModelError(
            "pad_packed_sequence gives a tensor whose length is that of the longest sequence", location_here(),
            "give it the length of the input: total_length=x.shape[1], or x.shape[0] if batches are not first",
        )  # fmt: skip
    x, length = padded.x, padded.x.shape[0]
    if total != length:
        x = x[:total] if isinstance(total, int) and total < length else F.pad(x, (0, 0, 0, 0, 0, total - length))
    if value:
        is_past = torch.arange(x.shape[0])[:, None] >= padded.lengths
        x = x.masked_fill(is_past[:, :, None], value)
    return x.transpose(0, 1) if batch_first else x, padded.lengths


def _pack(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    from distir_relax.frontends.torch.packed_sequences import pack

    return pack(input, lengths, batch_first)


def _pack_several(sequences, enforce_sorted=True):  # type: ignore[no-untyped-def]
    from distir_relax.frontends.torch.packed_sequences import pack_several

    return pack_several(sequences)


def _unpack(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    from distir_relax.frontends.torch.packed_sequences import unpack

    return unpack(sequence, batch_first, padding_value, total_length)


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a recurrent layer, which takes padded sequences, too."""

    def forward(layer: Any, input: Any, hx: Any = None) -> Any:
        from torch.nn.utils.rnn import PackedSequence

        if not isinstance(input, PackedSequence):
            return original(layer, input, hx)
        padded, name = input[0], layer.mode.lower()
        if not isinstance(padded, Padded):
            raise _refused("parts of its own are given to")
        x, count = padded.x, layer.num_layers * (2 if layer.bidirectional else 1)
        if hx is None:
            widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
            states = [x.new_zeros(count, x.shape[1], width) for width in widths[: 2 if name == "lstm" else 1]]
        else:
            states = list(hx) if name == "lstm" else [hx]
        weights = [weight for one in layer.all_weights for weight in one]
        outputs, *last = padded_recurrence()(
            name, x, padded.lengths, states, weights, layer.bias, layer.num_layers, layer.dropout,
            layer.training, layer.bidirectional,
        )  # fmt: skip
        found = Padded(outputs, padded.lengths, padded.longest)
        return PackedSequence._make([found] * 4), tuple(last) if name == "lstm" else last[0]

    return forward


def _refused(what: str) -> ImportModelError:
    return ImportModelError(
        f"{what} a packed sequence, whose size depends on the lengths", location_here(),
        "give it to recurrent layers alone; compute all else of padded tensors, whose ends a mask or ignore_index "
        "leaves out",
    )  # fmt: skip


@cache
def padded_recurrence() -> Any:
    """Return the op of an exported graph, ``distir::padded_recurrence``: outputs (t, n, h), then the last states."""
    import torch

    schema = (
        "(str kind, Tensor x, Tensor lengths, Tensor[] states, Tensor[] params, bool biased, int layers, "
        "float dropout, bool train, bool bidirectional) -> Tensor[]"
    )

    def shapes(kind: str, x: Any, lengths: Any, states: Any, params: Any, *options: Any) -> list[torch.Tensor]:
        width = states[0].shape[2] * (2 if options[4] else 1)
        return [x.new_empty((*x.shape[:2], width)), *(torch.empty_like(state) for state in states)]

    return graph_op("padded_recurrence", schema, _by_torch, shapes)


def _by_torch(
    kind: str,
    x: torch.Tensor,
    lengths: torch.Tensor,
    states: list[torch.Tensor],
    params: list[torch.Tensor],
    *rest: Any,
) -> list[torch.Tensor]:
    """Compute the op by torch, with sequences packed."""
    import torch
    from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

    packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None
    assert back is not None
    given = [state.index_select(1, order) for state in states]
    layers = getattr(torch, kind)
    outputs, *last = layers(packed.data, packed.batch_sizes, given if kind == "lstm" else given[0], params, *rest)
    padded, _ = pad_packed_sequence(PackedSequence(outputs, *packed[1:]), total_length=x.shape[0])
    return [padded, *(state.index_select(1, back) for state in last)]
