"""The GPU profiles against published times of collectives (`benchmarks.collective_tables`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.collective_tables.__main__ import main
from benchmarks.collective_tables.rows import SOURCES, Row, read_rows


def rows(source: str, note: str = "") -> list[Row]:
    return [row for row in read_rows() if row.source == source and row.note == note]


def test_rings_within_and_between_nodes_are_predicted() -> None:
    found = rows("ml-engineering-sharp", "ring") + rows("ml-engineering-4-nodes", "ring")
    assert [row.ranks for row in found] == [4, 5, 6, 7, 8, 32]
    assert max(abs(row.error) for row in found) < 0.04


def test_nodes_that_share_few_nics_are_predicted() -> None:
    found = rows("nccl-tests-152")
    assert len(found) == 7
    assert max(abs(row.error) for row in found) < 0.11
    # With a NIC for each GPU the large ones would take half as long.
    own = [replace(row, scale="").predicted / row.seconds for row in found[-3:]]
    assert max(own) < 0.54


def test_rows_are_read_with_their_units() -> None:
    assert {row.source for row in read_rows()} == set(SOURCES)
    ring = rows("ml-engineering-sharp", "ring")[0]
    assert ring.seconds == pytest.approx(2 * 3 / 4 * 2**33 / 363.3e9)
    gathered = next(row for row in read_rows() if row.collective == "all_gather")
    assert gathered.seconds == pytest.approx(255 / 256 * 2**31 / 200e9)
    assert rows("nccl-527")[0].seconds == pytest.approx(8142.6e-6)


def test_the_command_prints_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["collective_tables", "--source", "nccl-527"])
    assert main() == 0
    assert "nccl-527 " in (text := capsys.readouterr().out)
    assert "dgxc" not in text
