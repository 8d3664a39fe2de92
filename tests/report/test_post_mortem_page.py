"""The page of a launch that has failed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from distir_relax.errors import DistIRError
from distir_relax.report.post_mortem_page import post_mortem_page, write_post_mortem_page
from distir_relax.runtime.agents import post_mortem
from distir_relax.runtime.progress import Progress
from distir_relax.runtime.rank_record import record_of


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    progress = Progress()
    progress.enter(0, "all_reduce")
    records = {
        rank: {**record_of(rank, progress, ["%z = all_reduce(%y)  # <model>.py:8"]), "step_seconds": [0.5, 0.25 + rank]}
        for rank in (0, 2)
    }
    path = post_mortem.write_post_mortem("rank 1 on b was killed by SIGKILL", {"a": [0], "b": [1, 2]}, records)
    assert path is not None
    return path


def test_the_page_has_positions_steps_and_stacks(file: Path) -> None:
    text = post_mortem_page(file)
    assert "<h1>rank 1 on b was killed by SIGKILL</h1>" in text
    assert "rank 0 waits in step #0 %z = all_reduce(%y)  # &lt;model&gt;.py:8" in text
    assert "<model>" not in text
    assert "rank 1 left no record" in text
    assert "2 of them left a record" in text
    assert "2.25 s" in text, "the last step of rank 2"
    assert "<summary>rank 2: MainThread</summary>" in text
    assert "test_the_page" not in text
    assert "record_of" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"failure": 1}', '{"failure": "x", "time": "now", "missing": {"collective": ""}}']
)
def test_another_file_is_one_message_and_no_page(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    with pytest.raises(DistIRError, match=r"other\.json|expected"):
        write_post_mortem_page(other, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_damaged_record_is_one_message(file: Path) -> None:
    content = json.loads(file.read_text())
    content["ranks"][0]["step_seconds"] = ["x"]
    file.write_text(json.dumps(content))
    with pytest.raises(DistIRError, match="step_seconds"):
        post_mortem_page(file)
