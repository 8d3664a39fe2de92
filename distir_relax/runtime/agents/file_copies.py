"""Files of a launch on hosts that lack them: the launcher sends each host what its ranks need, over a connection.

A host has a file if one with the same digest is at the same path, as on a shared disk, or in the folder of copies of
an earlier launch. A copy is written to a temporary folder, and moved to its place once its HMAC was right.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from distir_relax.errors import DistIRError
from distir_relax.runtime.agents.admission import admit
from distir_relax.runtime.agents.wire import PATIENCE, WireError, encode, introduce, read_message
from distir_relax.support.file_slices import HostFile, Slice

_MANIFEST = "manifest.json"
# Files of a folder with a manifest that are longer are in its checksums.
_HASHED = 1 << 20
_BLOCK = 1 << 20
_MOST_HEADER = 1 << 26
# Seconds in which the other side reads or writes something.
_PATIENCE = 30.0
# Copies that are kept, and seconds after which an unfinished one is that of a process that was killed.
_KEPT, _UNFINISHED = 8, 86_400.0


@dataclass(frozen=True)
class LaunchFile:
    """A file or folder that ranks read, an `argument` of their program; `files_of` are its files for some ranks.

    By default these are all of its files.
    """

    argument: str
    files_of: Callable[[Sequence[int]], Sequence[HostFile]] | None = None

    @cached_property
    def digest(self) -> str:
        """The digest of its contents."""
        return digest(Path(self.argument))

    def files(self, ranks: Sequence[int]) -> Sequence[HostFile]:
        """Return the files for some ranks, with paths relative to the folder, or to that of a single file."""
        if self.files_of is not None:
            return self.files_of(ranks)
        path = Path(self.argument)
        if not path.is_dir():
            return [HostFile.whole("", path)]
        inner = sorted(one for one in path.rglob("*") if one.is_file())
        return [HostFile.whole(str(one.relative_to(path)), one) for one in inner]

    def request(self, ranks: Sequence[int]) -> dict[str, str]:
        """Return what the agent of a host with these ranks looks for."""
        key = hashlib.sha256(f"{self.digest} {list(ranks)}".encode()).hexdigest()[:24]
        return {"argument": self.argument, "path": os.path.abspath(self.argument), "digest": self.digest, "key": key}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names, sizes and contents of all files of a folder; "" without it.

    Of a folder with a manifest, as a bundle is, contents of large files are left out: the manifest has their checksums.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        if not path.is_dir():
            return ""
        has_manifest, total = (path / _MANIFEST).is_file(), hashlib.sha256()
        for one in sorted(one for one in path.rglob("*") if one.is_file()):
            size = one.stat().st_size
            content = "" if has_manifest and size > _HASHED else digest(one)
            total.update(f"{one.relative_to(path)} {size} {content}\n".encode())
        return total.hexdigest()
    except OSError:
        return ""


def copies_folder() -> Path:
    """Return the folder of this host's copies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "distir-relax" / "copies"


class FileServer:
    """A port at which agents get the `files` of a launch, in threads; `hosts` are names with their ranks.

    The files are hashed. `error` is the first error of a file that cannot be sent; lost connections are none.
    """

    def __init__(
        self, address: str, token: bytes, files: Sequence[LaunchFile], hosts: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        self.error: DistIRError | None = None
        self._token, self._files = token, files
        self._hosts = hosts
        self._requests = [[file.request(ranks) for file in files] for _, ranks in hosts]
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        admit(self._socket, token, "files", self._answer)

    def requests(self, host: int) -> list[dict[str, str]]:
        """Return the requests of a host."""
        return self._requests[host]

    def close(self) -> None:
        """Close the port."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock, suppress(OSError, WireError, ValueError, TypeError, IndexError):
                message = read_message(sock, time.monotonic() + PATIENCE)
                file, (host, ranks) = self._files[int(message["file"])], self._hosts[int(message["host"])]
                files = file.files(ranks)
                total = sum(one.bytes for sent in files for one in sent.slices)
                print(f"sending {file.argument} to {host}: {total:,} bytes", file=sys.stderr, flush=True)
                send(sock, self._token, os.path.basename(os.path.abspath(file.argument)), files)
        except DistIRError as error:
            self.error = self.error or error


def fetch(requests: Sequence[Mapping[str, str]], address: tuple[str, int], token: bytes, host: int) -> dict[str, str]:
    """Return the place of each requested file on this host, by its argument, after copying those that it lacks.

    Raises OSError and WireError if that fails.
    """
    places = {}
    for number, request in enumerate(requests):
        place = find(request)
        if place is None:
            with socket.create_connection(address, _PATIENCE) as sock:
                introduce(sock, token, "copies")
                sock.sendall(encode({"file": number, "host": host}))
                place = receive(sock, token, request["key"])
        places[request["argument"]] = str(place)
    return places


def find(request: Mapping[str, str]) -> Path | None:
    """Return where this host has a file that was requested, None if it lacks it."""
    path = Path(request["path"])
    if digest(path) == request["digest"]:
        return path
    place = copies_folder() / request["key"]
    with suppress(OSError):
        found = place / (place / "place").read_text(encoding="utf-8")
        os.utime(place)
        return found
    return None


def send(sock: socket.socket, token: bytes, name: str, files: Sequence[HostFile]) -> None:
    """Send the files of a folder, or a single file, called `name`. Raises OSError if the connection fails."""
    # Files of weights may be outside of the folder: it is so deep in the copy that they are not.
    ups = max((Path(file.path).parts.count("..") for file in files), default=0)
    place = os.path.join(*["up"] * ups, name)
    rows = [
        {
            "path": os.path.normpath(os.path.join(place, file.path)),
            "size": file.size,
            "slices": [list(one) for one in file.slices or [Slice(0, file.size)]],
        }
        for file in files
    ]
    header = json.dumps({"place": place, "files": rows}).encode()
    sock.settimeout(_PATIENCE)
    code = hmac.new(token, header, hashlib.sha256)
    with sock.makefile("wb", _BLOCK) as stream:
        stream.write(len(header).to_bytes(8, "big") + header)
        for file in files:
            for data in _contents(file):
                code.update(data)
                stream.write(data)
        stream.write(code.digest())


def receive(sock: socket.socket, token: bytes, key: str) -> Path:
    """Write the files that `send` sends to a folder of copies; return the place of the copy.

    Raises OSError if the connection or the disk fails, or something else was sent.
    """
    folder = copies_folder()
    folder.mkdir(parents=True, exist_ok=True)
    sock.settimeout(_PATIENCE)
    target = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
    try:
        with sock.makefile("rb", _BLOCK) as stream:
            length = int.from_bytes(_exactly(stream, 8), "big")
            if length > _MOST_HEADER:
                raise OSError("the copy has no header")
            header = _exactly(stream, length)
            code = hmac.new(token, header, hashlib.sha256)
            content = json.loads(header)
            for row in content["files"]:
                path = target / row["path"]
                if os.path.isabs(row["path"]) or ".." in Path(row["path"]).parts:
                    raise OSError("a file outside of the copy")
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.truncate(row["size"])
                    _write(file, row, stream, code)
            if not hmac.compare_digest(_exactly(stream, code.digest_size), code.digest()):
                raise OSError("the copy was changed on its way")
        (target / "place").write_text(content["place"], encoding="utf-8")
        with suppress(OSError):
            # Another launch may have made the same.
            target.rename(folder / key)
        _prune(folder, key)
        return folder / key / str(content["place"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"the copy has another form: {error}") from None
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _prune(folder: Path, key: str) -> None:
    """Delete the copies that have not been used for longest, except that with a `key`."""
    with suppress(OSError):
        unfinished = [place for place in folder.glob(".*") if time.time() - place.stat().st_mtime > _UNFINISHED]
        for place in unfinished:
            shutil.rmtree(place, ignore_errors=True)
        copies = sorted(folder.glob("*/place"), key=lambda place: place.parent.stat().st_mtime)
        for place in copies[:-_KEPT]:
            if place.parent.name != key:
                shutil.rmtree(place.parent, ignore_errors=True)


def _contents(file: HostFile) -> Iterator[bytes]:
    if file.source is None:
        yield file.text
        return
    with file.source.open("rb", buffering=0) as source:
        for one in file.slices:
            for position, length in one.pieces(_BLOCK):
                data = os.pread(source.fileno(), length, position)
                if len(data) != length:
                    raise OSError(f"{file.source} was truncated while it was sent")
                yield data


def _write(file: BinaryIO, row: dict[str, Any], stream: Any, code: hmac.HMAC) -> None:
    for numbers in row["slices"]:
        for position, length in Slice(*numbers).pieces(_BLOCK):
            data = _exactly(stream, length)
            code.update(data)
            os.pwrite(file.fileno(), data, position)


def _exactly(stream: Any, length: int) -> bytes:
    data: bytes = stream.read(length)
    if len(data) != length:
        raise OSError("the connection has ended")
    return data
