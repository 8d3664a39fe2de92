"""Pairs of features equal one device, or are refused, as docs/composition.md says (`make composition`)."""

from __future__ import annotations

import pytest

from tests.composition.cells import PAGE, Cell, page, pairs, read_page, shown, tried
from tests.composition.features import FEATURES, Feature

WRITTEN = read_page(PAGE.read_text())


@pytest.mark.drawn(9)
@pytest.mark.parametrize(("one", "other"), list(pairs()), ids=lambda feature: feature.name)
def test_two_features_together(one: Feature, other: Feature) -> None:
    assert shown(tried(one, other)) == WRITTEN[one.name, other.name]


def test_no_pair_is_left_out() -> None:
    assert set(WRITTEN) == {(one.name, other.name) for one, other in pairs()}
    assert all(WRITTEN.values())


def test_a_page_is_read_as_it_was_written() -> None:
    names = [feature.name for feature in FEATURES]
    kinds = (
        ("runs", ""),
        ("one of", "zero"),
        ("refused", "expected one"),
        ("refused", "expected two, found 1/2/3/4,zero=1"),
        ("apart", ""),
    )
    cells = [
        Cell(one.name, other.name, *kinds[(names.index(one.name) * 7 + names.index(other.name)) % 5])
        for one, other in pairs()
    ]
    assert read_page(page(cells)) == {(cell.one, cell.other): shown(cell) for cell in cells}
    with pytest.raises(ValueError, match="data x tensor: losses differ"):
        page([*cells, Cell("data", "tensor", "wrong", "losses differ")])
