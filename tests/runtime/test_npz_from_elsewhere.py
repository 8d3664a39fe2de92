"""`.npz` files that are damaged or made to harm: an error with the file and the array."""

from __future__ import annotations

import io
import os
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from distir_relax.errors import RunError
from distir_relax.runtime.npz import read_npz


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A `.npy` file with this header."""
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + length + header.encode("latin-1") + data


def header(shape: str = "(2, 3)", descr: str = "'<f4'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


DATA = np.arange(6, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(header(), DATA)[:40], "'x'.*expected the dtype of numbers and a shape"),
        (npy(header(), DATA)[:8], "'x'.*expected the dtype of numbers and a shape, found ''"),
        (b"no array", r"'x'.*expected version 1\.0 or 2\.0 of the \.npy format, found b'no array'"),
        (b"", "'x'.*found b''"),
        (npy(header("(1000000000000,)"), DATA), "expected 4,000,000,000,000 bytes .*, found 24"),
        (npy(header("(9223372036854775807, 9223372036854775807)"), DATA), "'x'.*expected .* bytes"),
        (npy(header("(99999999999999999999,)"), DATA), "no array has the shape"),
        (npy(header("(" + "9" * 5000 + ",)"), DATA), "expected the dtype of numbers and a shape"),
        (npy(header("(0, 99999999)"), DATA), "expected 0 bytes .*, found 24"),
        (npy(header("(-2, 3)"), DATA), "expected the dtype of numbers and a shape"),
        (npy(header("(2, 3"), DATA), "expected the dtype of numbers and a shape"),
        (npy(header(descr="'|O'"), DATA), "expected the dtype of numbers and a shape"),
        (npy(header(descr="'<f3'"), DATA), "there is no dtype '<f3'"),
        (npy(header(descr="[('a', '<f4')]"), DATA), "expected the dtype of numbers and a shape"),
        (npy("(" * 9000), "expected the dtype of numbers and a shape"),
        (npy("-" * 9000 + "1"), "expected the dtype of numbers and a shape"),
        (npy(header() + " " * 20_000, DATA), "a header of at most 10,000 bytes"),
        (npy(header(), DATA, b"\x09\x00"), r"expected version 1\.0 or 2\.0"),
        (npy(header(), DATA + b"more"), "expected 24 bytes .*, found 28"),
        (npy(header(), DATA[:-1]), "expected 24 bytes .*, found 23"),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_arrays_that_are_none(tmp_path: Path, content: bytes, message: str, method: int) -> None:
    with pytest.raises(RunError, match=message) as raised:
        read_npz(archive(tmp_path / "x.npz", {"x.npy": content}, method))
    assert "x.npz ('x')" in raised.value.where


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    made = {
        "c": np.arange(6.0).reshape(2, 3), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(5, dtype=">i2"), "scalar": np.float16(2), "empty": np.zeros((0, 3), bool),
        "complex": np.array([1j]), "long": np.ones((1,) * 60, np.uint8),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **made)
        found = read_npz(tmp_path / "x.npz")
        assert list(found) == list(made)
        for name, array in found.items():
            np.testing.assert_array_equal(array, made[name])
            assert (array.shape, array.dtype) == (made[name].shape, made[name].dtype.newbyteorder("="))
            assert array.flags.writeable
    archive(tmp_path / "two.npz", {"x.npy": npy(header(), DATA, b"\x02\x00")})
    np.testing.assert_array_equal(read_npz(tmp_path / "two.npz")["x"], np.arange(6.0).reshape(2, 3))


def patched(path: Path, at: bytes, offset: int, content: bytes) -> Path:
    """Change bytes at an offset from the first place of `at` in a file."""
    whole = bytearray(path.read_bytes())
    place = whole.index(at) + offset
    whole[place : place + len(content)] = content
    path.write_bytes(whole)
    return path


def test_archives_that_are_none(tmp_path: Path) -> None:
    def made(method: int = zipfile.ZIP_DEFLATED) -> Path:
        return archive(tmp_path / "x.npz", {"x.npy": npy(header("(100, 100)"), bytes(40_000))}, method)

    directory = b"PK\x01\x02"
    with pytest.raises(RunError, match="the array is encrypted"):
        read_npz(patched(made(), directory, 8, b"\x01"))
    with pytest.raises(RunError, match="compressed by an unknown method, 99"):
        read_npz(patched(made(), directory, 10, b"\x63"))
    with pytest.raises(RunError, match=r"('x').*not a readable array"):
        read_npz(patched(made(), b"PK\x03\x04", 30 + len("x.npy"), b"\xff" * 8))
    with pytest.raises(RunError, match="declares 4,294,967,280 bytes, more than"):
        read_npz(patched(made(), directory, 24, b"\xf0\xff\xff\xff"))
    with pytest.raises(RunError, match=r"the arrays declare 4,294,967,280 bytes, the file has \d+"):
        read_npz(patched(made(), directory, 20, b"\xf0\xff\xff\xff"))
    with pytest.raises(RunError, match="the array 'x' occurs twice"):
        read_npz(archive(tmp_path / "x.npz", {"x": npy(header(), DATA), "x.npy": npy(header(), DATA)}))
    with pytest.raises(RunError, match="compressed by an unknown method, 14"):
        read_npz(made(zipfile.ZIP_LZMA))
    whole = made().read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "x.npz").write_bytes(whole[:length])
        with pytest.raises(RunError, match=r"x\.npz: not an \.npz file, or a truncated one"):
            read_npz(tmp_path / "x.npz")


@pytest.mark.timeout(10)
def test_special_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(RunError, match="expected a file, found a FIFO"):
        read_npz(tmp_path / "x.npz")
    with pytest.raises(RunError, match="expected a file, found a device"):
        read_npz("/dev/zero")
    with pytest.raises(RunError, match="expected a file, found a folder"):
        read_npz(tmp_path)
    with pytest.raises(RunError, match="not a file's name"):
        read_npz("x\0.npz")


def test_no_memory_is_taken_for_what_the_file_cannot_hold(tmp_path: Path) -> None:
    """Members of a gigabyte each, all of the same bytes of the file: refused before the first is unpacked."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", npy(header("(268435456,)"), bytes(1 << 24)))
    whole = packed.getvalue()
    start, end = whole.index(b"PK\x01\x02"), whole.index(b"PK\x05\x06")
    entry = whole[start:end]
    entries = b"".join(entry.replace(b"x.npy", b"%05d" % number) for number in range(1000))
    tail = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1000, 1000, len(entries), start, 0)
    (tmp_path / "x.npz").write_bytes(whole[:start] + entries + tail)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match="the arrays declare"):
        read_npz(tmp_path / "x.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
