"""Reader of `.npz` files that checks all declared sizes against the file's length before it allocates memory.

An `.npz` file is a zip archive (PKWARE's APPNOTE.TXT 6.3.10) of `.npy` files: a magic number, a header that is a Python
literal with dtype and shape, and the data (NumPy enhancement proposal 1).
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from distir_relax.errors import RunError
from distir_relax.support import check_regular, shown, shown_path

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER = 10_000
"""Maximum length of a `.npy` header, as in numpy."""

WRITE_HINT = "write one with numpy.savez('x.npz', name=array, ...)"
_MAX_EXPANSION = 1032
"""Maximum expansion of one deflated byte (RFC 1951: 258 bytes by two bits)."""
_ENCRYPTED = 1
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, zlib.error, struct.error)
"""Exceptions of the zip module for a damaged or unsupported archive."""


def read_npz(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the named arrays of an `.npz` file. Nothing is unpickled.

    Raises RunError, with the name of the array, if the file is missing, is not an archive, or is damaged; if it is
    encrypted or compressed otherwise than by deflate; and if an array's shape does not fit its bytes.
    """
    length = check_regular(path, RunError, "there is no such input file")
    place = shown_path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            arrays: dict[str, np.ndarray[Any, Any]] = {}
            members = archive.infolist()
            # Overlapping members would each be unpacked from the same bytes.
            if (packed := sum(member.compress_size for member in members)) > length:
                raise RunError(f"the arrays declare {packed:,} bytes, the file has {length:,}", place)
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise RunError(f"the array {shown(name)} occurs twice", place)
                arrays[name] = _array(archive, member, f"{place} ({shown(name)})")
            return arrays
    except OSError as wrong:
        raise RunError(f"cannot be read: {wrong.strerror or wrong}", place, WRITE_HINT) from None
    except _DAMAGED as wrong:
        raise RunError(f"not an .npz file, or a truncated one: {wrong}", place, WRITE_HINT) from None


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if member.flag_bits & _ENCRYPTED:
        raise RunError("the array is encrypted", place, WRITE_HINT)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RunError(f"the array is compressed by an unknown method, {member.compress_type}", place, WRITE_HINT)
    expansion = 1 if member.compress_type == zipfile.ZIP_STORED else _MAX_EXPANSION
    if member.file_size > expansion * member.compress_size:
        raise RunError(
            f"the array declares {member.file_size:,} bytes, more than its compressed bytes can hold",
            place,
            WRITE_HINT,
        )
    try:
        with archive.open(member) as file:
            dtype, shape, order = _header(file)
            size = math.prod(shape) * dtype.itemsize
            rest = member.file_size - file.tell()
            if size != rest:
                raise RunError(f"expected {size:,} bytes for {dtype} {shape}, found {rest:,}", place)
            data = file.read()
            if len(data) != size:
                raise RunError(f"expected {size:,} bytes for {dtype} {shape}, found {len(data):,}", place)
    except (*_DAMAGED, OSError) as wrong:
        raise RunError(f"not a readable array: {wrong}", place, WRITE_HINT) from None
    # Copy, since the buffer is read-only; convert to native byte order.
    array = np.frombuffer(data, dtype).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="), order="K")


def _header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return dtype, shape and order of the `.npy` data that begins here. Raises ValueError if there is none."""
    import numpy as np

    magic = file.read(8)
    # The length of the header has 2 bytes in version 1, 4 in version 2.
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(magic)
    if width is None:
        raise ValueError(f"expected version 1.0 or 2.0 of the .npy format, found {magic!r}")
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER:
        raise ValueError(f"expected a header of at most {MAX_HEADER:,} bytes, found {length:,}")
    header = file.read(length).decode("latin-1")
    # numpy evaluates it as Python, which recurses without limit.
    match = _HEADER.fullmatch(header)
    if match is None or len(header) != length:
        raise ValueError(f"expected the dtype of numbers and a shape, found {shown(header)}")
    try:
        dtype = np.dtype(match["descr"])
    except TypeError:
        raise ValueError(f"there is no dtype {match['descr']!r}") from None
    shape = tuple(int(n) for n in match["shape"].split(",") if n.strip())
    if any(n >= 2**63 for n in shape):
        raise ValueError(f"no array has the shape {shape}")
    return dtype, shape, "F" if match["fortran"] == "True" else "C"


_HEADER = re.compile(
    r"\{\s*'descr':\s*'(?P<descr>[<>|=]?[bfiuc]\d{1,2})',\s*'fortran_order':\s*(?P<fortran>True|False),"
    r"\s*'shape':\s*\((?P<shape>(?:\s*\d{1,20}\s*,)*+\s*(?:\d{1,20}\s*)?)\),?\s*\}\s*"
)
