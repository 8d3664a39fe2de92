"""Tensors that grow: appended elements are those of a concatenation, in reserved memory if there is some."""

from __future__ import annotations

import torch

from distir_relax.kernels.sequence import append, extend


def test_appending_is_concatenation_in_place() -> None:
    parts = [torch.randn(2, n, 3) for n in (0, 5, 1, 70, 1, 1)]
    x = parts[0]
    moved = 0
    for count, part in enumerate(parts[1:], 2):
        before = x.untyped_storage().data_ptr()
        x = append(x, part, 1)
        torch.testing.assert_close(x, torch.cat(parts[:count], 1), rtol=0, atol=0)
        moved += x.untyped_storage().data_ptr() != before
    # At first, and where 64 elements did not suffice.
    assert moved == 2


def test_a_second_continuation_does_not_change_the_first() -> None:
    past = append(torch.zeros(1, 0, 2), torch.ones(1, 3, 2), 1)
    first, second = append(past, torch.full((1, 1, 2), 2.0), 1), append(past, torch.full((1, 2, 2), 3.0), 1)
    assert first[0, :, 0].tolist() == [1, 1, 1, 2]
    assert second[0, :, 0].tolist() == [1, 1, 1, 3, 3]
    assert past[0, :, 0].tolist() == [1, 1, 1]


def test_a_tensor_without_reserved_memory_is_not_written_to() -> None:
    whole = torch.arange(5.0)
    assert append(whole[:2], torch.zeros(1), 0).tolist() == [0, 1, 0]
    assert whole.tolist() == [0, 1, 2, 3, 4]


def test_a_buffer_is_extended_in_place() -> None:
    buffer = torch.zeros(2, 5)
    extend(buffer, 0, torch.ones(2, 3), 1)
    longer = extend(buffer, 1, torch.full((2, 2), 7.0), 1)
    assert longer.tolist() == [[1, 7, 7], [1, 7, 7]]
    assert buffer.tolist() == [[1, 7, 7, 0, 0], [1, 7, 7, 0, 0]]
