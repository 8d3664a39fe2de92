"""Random torch models with symbolic dims, compiled once, give torch's numbers at all sizes; ``make fuzz`` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.symbolic_models import check, draw, shrink

COUNT, CHUNK = 16, 8


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_a_random_model_gives_what_torch_gives_at_all_sizes(first: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        drawn = draw(seed)
        try:
            found += check(drawn)
        except Exception as wrong:
            wrong.add_note(f"model {seed}: {shrink(drawn)}")
            raise
    # Each compiled model runs at four sizes. What is refused is the exception.
    assert found["right"] >= CHUNK * 5 // 2, found
