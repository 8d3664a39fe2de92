"""Values of a block of positions are those computed for each request's own sizes; masks all true are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from distir_relax.runtime.requests.sized_values import BLOCK, SizedValues

Allows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def prepared(allows: Allows) -> Callable[[int, int, int], Sequence[torch.Tensor]]:
    def prepare(past: int, new: int, last: int) -> Sequence[torch.Tensor]:
        rows = torch.arange(past, past + new)
        return [allows(rows[:, None], torch.arange(past + new))[None], rows + 1]

    return prepare


@pytest.mark.parametrize("dims", [[["", "new", "all"], ["new"]], None])
@pytest.mark.parametrize(
    ("allows", "is_all_true"),
    [
        (lambda row, column: column <= row, lambda past: True),
        (lambda row, column: (column <= row) & (row - column < 9), lambda past: past < 9),
        (lambda row, column: (column <= row) & (column != 70), lambda past: past < 70),
    ],
)
def test_values_of_blocks(allows: Allows, is_all_true: Callable[[int], bool], dims: list[list[str]] | None) -> None:
    prepare = prepared(allows)
    values = SizedValues(prepare, dims, [0], BLOCK + 30)
    for past, new in [(0, 1), (8, 1), (9, 1), (63, 1), (64, 1), (93, 1), (69, 1), (70, 1), (5, 3), (62, 7), (80, 14)]:
        mask, positions = values.of(past, new, 1)
        expected = prepare(past, new, 1)
        assert positions is not None
        assert positions.tolist() == expected[1].tolist()
        assert (mask is None) == (new == 1 and is_all_true(past))
        if mask is not None:
            assert torch.equal(mask, expected[0])


def test_values_that_are_no_masks_stay() -> None:
    values = SizedValues(prepared(lambda row, column: column <= row), [["", "new", "all"], ["new"]], [], None)
    assert all(value is not None for value in values.of(3, 1, 1))
