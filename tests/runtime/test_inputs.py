"""Reading inputs and writing outputs: whole files or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.runtime.inputs import atomic_file, check_writable, write_npz
from distir_relax.runtime.npz import read_npz


def test_round_trip(tmp_path: Path) -> None:
    arrays = {"a": torch.arange(6).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "s": torch.tensor(2.0)}
    write_npz(tmp_path / "y.npz", arrays)
    found = read_npz(tmp_path / "y.npz")
    assert {name: value.dtype.name for name, value in found.items()} == {
        "a": "int64",
        "half": "float32",
        "s": "float32",
    }
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value.float().numpy())
    assert [item.name for item in tmp_path.iterdir()] == ["y.npz"]


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such input file"):
        read_npz(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(RunError, match=r"x\.npy: not an \.npz file"):
        read_npz(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=np.ones(300))
    content = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(content[:200])
    with pytest.raises(RunError, match="truncated"):
        read_npz(tmp_path / "short.npz")
    (tmp_path / "flipped.npz").write_bytes(content[:300] + b"!!!!" + content[304:])
    with pytest.raises(RunError, match=r"not a readable array"):
        read_npz(tmp_path / "flipped.npz")
    np.savez(tmp_path / "pickle.npz", x=np.array([{}], dtype=object))
    with pytest.raises(RunError, match=r"not a readable array"):
        read_npz(tmp_path / "pickle.npz")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "y.npz")
    with pytest.raises(RunError, match="found a folder"):
        check_writable(tmp_path)
    with pytest.raises(RunError, match="no such folder"):
        check_writable(tmp_path / "nowhere" / "y.npz")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "y.npz"
    target.write_text("old")

    def write_half() -> None:
        with atomic_file(target) as temporary:
            temporary.write_text("half of the n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert target.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["y.npz"]
    with pytest.raises(RunError, match="cannot be written"), atomic_file(tmp_path / "nowhere" / "y.npz"):
        pass
