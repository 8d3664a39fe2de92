"""Frames over a Unix socket: a JSON header, bytes, and open files."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Bytes of the header, bytes of the payload, number of files.
_PREFIX = struct.Struct("<IQI")
_READ = 1 << 18
_FILE = struct.calcsize("i")
# Bytes for the numbers of the most files in a message.
_CONTROL = socket.CMSG_LEN(16 * _FILE)


class Disconnected(Exception):
    """The other end has closed its socket, or has ended."""


@dataclass(frozen=True)
class Frame:
    """A message: a JSON object, bytes, and files, which the receiver closes."""

    header: Mapping[str, Any]
    payload: bytes
    files: tuple[int, ...]


class Connection:
    """One end of a connection. `send` may be called from any thread; one thread at a time reads."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._filling = threading.Lock()
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def send(self, header: Mapping[str, Any], payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a frame. Raises Disconnected."""
        text = json.dumps(header, separators=(",", ":")).encode()
        data = memoryview(b"".join((_PREFIX.pack(len(text), len(payload), len(files)), text, payload)))
        with self._sending:
            try:
                if files:
                    data = data[socket.send_fds(self.socket, [data[:1]], files) :]
                while data:
                    data = data[self._send_some(data) :]
            except OSError as wrong:
                raise Disconnected(str(wrong)) from None

    def receive(self) -> Frame:
        """Wait for the next frame. Raises Disconnected."""
        while (frame := self.take()) is None:
            if not self.fill(wait=True):
                raise Disconnected
        return frame

    def take(self) -> Frame | None:
        """Return the next frame if it has been read completely."""
        if len(self._buffer) < _PREFIX.size:
            return None
        header, payload, files = _PREFIX.unpack_from(self._buffer)
        start, end = _PREFIX.size + header, _PREFIX.size + header + payload
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as data:
            frame = Frame(
                json.loads(bytes(data[_PREFIX.size : start])), bytes(data[start:end]),
                tuple(self._files.popleft() for _ in range(files)),
            )  # fmt: skip
        del self._buffer[:end]
        return frame

    def fill(self, wait: bool = False) -> bool:
        """Read some bytes that have arrived, or `wait` for some; return False at the end of the connection."""
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        with self._filling:
            try:
                # socket.recv_fds ignores its flags.
                data, controls, _, _ = self.socket.recvmsg(_READ, _CONTROL, flags)
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._buffer += data
            for level, kind, content in controls:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._files.extend(memoryview(content[: len(content) // _FILE * _FILE]).cast("i"))
        return bool(data)

    def close(self) -> None:
        """Close this end; a thread that waits for the other one returns."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Close the socket and files of this process alone: others that have them, after a fork, keep theirs."""
        self.socket.close()
        while self._files:
            os.close(self._files.popleft())

    def _send_some(self, data: memoryview) -> int:
        """Send some bytes; while the other end does not read, since it sends itself, read its data."""
        while True:
            try:
                return self.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self.socket, select.POLLOUT | select.POLLIN)
                events = waiting.poll()[0][1]
                if events & select.POLLIN and not self._filling.locked() and not self.fill():
                    raise Disconnected from None


def short_path(folder: int, name: str) -> str:
    """Return a path of a socket in an open folder; paths of sockets have at most 107 bytes."""
    return f"/proc/self/fd/{folder}/{name}"
