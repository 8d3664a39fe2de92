"""Error measures, against values worked out by hand."""

from __future__ import annotations

import pytest

from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman


def test_mean_absolute_percentage_error() -> None:
    # Off by 50 %, 25 % and 0 %.
    assert mean_absolute_percentage_error([15, 3, 7], [10, 4, 7]) == pytest.approx(0.25)
    assert mean_absolute_percentage_error([2.0], [2.0]) == 0.0


def test_spearman_sees_order_alone() -> None:
    assert spearman([1, 2, 3, 4, 5], [1, 8, 27, 64, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1.0)
    # Ranks 1 2 3 4 5 and 2 1 4 3 5: squared differences 1 1 1 1 0, so 1 - 6 * 4 / (5 * 24).
    assert spearman([10, 20, 30, 40, 50], [2, 1, 4, 3, 5]) == pytest.approx(0.8)


def test_ties_share_their_mean_rank() -> None:
    # Ranks 0 1.5 1.5 3 and 0 1 2 3: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_lists_of_unlike_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        mean_absolute_percentage_error([1.0, 2.0], [1.0])
