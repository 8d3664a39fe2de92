"""Files that are read: regular ones, inside their folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from distir_relax.errors import BundleError
from distir_relax.support import check_name, file_within, read_bytes, read_text

NO_NAMES = (
    "/etc/passwd", "../evil.py", "a/../b", "a//b", "./a", "", ".", "..", "a/", "a\\b", "a\0b", "a\nb", "\ud800",
    "x" * 256,
)  # fmt: skip


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_lead_out_or_nowhere(name: str, tmp_path: Path) -> None:
    for look in (lambda: check_name(name, BundleError), lambda: file_within(tmp_path, name, BundleError)):
        with pytest.raises(BundleError, match="expected the path of a file inside the folder"):
            look()


@pytest.mark.timeout(10)
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "fine").write_text("text")
    for name, found in (("fifo", "a FIFO"), ("device", "a device"), (".", "a folder")):
        with pytest.raises(BundleError, match=f"expected a file, found {found}"):
            read_bytes(tmp_path / name, BundleError)
    with pytest.raises(BundleError, match="cannot be read: Too many levels of symbolic links"):
        read_bytes(tmp_path / "circle", BundleError)
    with pytest.raises(BundleError, match="there is no such file"):
        read_bytes(tmp_path / "fine" / "more", BundleError)
    with pytest.raises(BundleError, match="not a file's name: embedded null byte"):
        read_bytes(f"{tmp_path}/a\0b", BundleError)
    with pytest.raises(BundleError, match="expected at most 3 bytes, found 4"):
        read_bytes(tmp_path / "fine", BundleError, 3)
    assert read_text(tmp_path / "fine", BundleError) == "text"


def test_links_may_stay_inside(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_text("a")
    (folder / "b").symlink_to("inner/a")
    (tmp_path / "outer").write_text("outer")
    (folder / "out").symlink_to("../outer")
    (folder / "way").symlink_to("..")
    (tmp_path / "link").symlink_to(folder)
    for name in ("inner/a", "b"):
        assert file_within(tmp_path / "link", name, BundleError).read_text() == "a"
    for name in ("out", "way/outer"):
        with pytest.raises(BundleError, match=re.escape(f"{name}: a link leads out of the folder")):
            file_within(folder, name, BundleError)


def test_text_that_is_none_says_the_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"a\nb\n\xffc")
    with pytest.raises(BundleError, match="t:3: not UTF-8 text"):
        read_text(tmp_path / "t", BundleError)
