"""Messages of the launcher and its agents: JSON with a length before it, after both have proved a common token.

Sizes are checked before memory is taken, and nothing is executed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

MOST = 1 << 20
"""Maximum length of a message in bytes; before a connection is known, `MOST_UNKNOWN`."""
MOST_UNKNOWN = 1 << 10
_PREFIX = 4
_PAIRS = (("agent", "launcher"), ("client", "server"), ("copies", "files"), ("rank", "session"))
_PEERS = dict(_PAIRS) | {second: first for first, second in _PAIRS}
PATIENCE = 5.0
"""Seconds that a connection has until it is known."""


SESSION = "DISTIR_SESSION_TOKEN"
"""The variable of ranks with the token of their session, which is derived from that of the launch."""


def session_token(token: bytes) -> bytes:
    """Return the token by which ranks and their session know each other."""
    return hmac.new(token, b"session", hashlib.sha256).digest()


class WireError(Exception):
    """What a connection has sent is no message: it is closed."""


def encode(message: Message) -> bytes:
    """Return a message as it is sent."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return len(data).to_bytes(_PREFIX, "big") + data


class Decoder:
    """The messages in a stream of bytes. `most` is the maximum length of one."""

    def __init__(self, most: int = MOST_UNKNOWN) -> None:
        self.most = most
        self._data = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Iterate over the messages that end in `data`. Raises `WireError` for a longer one, and for other contents."""
        self._data += data
        while len(self._data) >= _PREFIX:
            length = int.from_bytes(self._data[:_PREFIX], "big")
            if not 0 < length <= self.most:
                raise WireError(f"a message of {length} bytes")
            if len(self._data) < _PREFIX + length:
                return
            text, self._data = self._data[_PREFIX : _PREFIX + length], self._data[_PREFIX + length :]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                raise WireError("a message that is not JSON") from None
            if not isinstance(message, dict):
                raise WireError("a message that is no table")
            yield message


class Handshake:
    """The beginning of a connection, in which each side proves that it knows the token, without sending it.

    `role` is "agent" or "launcher", between agents "client" or "server", for files "copies" or "files", in a session
    "rank" or "session"; a proof is valid for one role. Both send a number that is drawn for this connection, and answer
    that of the other.
    """

    def __init__(self, token: bytes, role: str) -> None:
        self._token, self._role = token, role
        self._drawn = secrets.token_hex(16)
        self._peer = _PEERS[role]
        self._answered = False
        self.is_done = False

    def first(self) -> Message:
        """Return what this side sends first."""
        return {"draws": self._drawn}

    def answer(self, message: Message) -> Message | None:
        """Return the answer to the other's number, or None after its answer. Raises `WireError` for a wrong one."""
        drawn, proof = message.get("draws"), message.get("proves")
        if isinstance(drawn, str) and len(drawn) == 2 * 16 and not self._answered:
            self._answered = True
            return {"proves": self._proof(self._role, drawn)}
        expected = self._proof(self._peer, self._drawn)
        if not (isinstance(proof, str) and self._answered and hmac.compare_digest(proof.encode(), expected.encode())):
            raise WireError("a wrong proof")
        self.is_done = True
        return None

    def _proof(self, role: str, drawn: str) -> str:
        return hmac.new(self._token, f"{role} {drawn}".encode(), hashlib.sha256).hexdigest()


def introduce(sock: socket.socket, token: bytes, role: str) -> None:
    """Exchange proofs over a socket that blocks, within `PATIENCE` seconds. Raises OSError and `WireError`."""
    until = time.monotonic() + PATIENCE
    handshake = Handshake(token, role)
    sock.settimeout(PATIENCE)
    sock.sendall(encode(handshake.first()))
    while not handshake.is_done:
        if (answer := handshake.answer(read_message(sock, until))) is not None:
            sock.sendall(encode(answer))
    sock.settimeout(PATIENCE)


def read_message(sock: socket.socket, until: float) -> Message:
    """Return the next message of a socket that blocks, a short one, until a time. Raises OSError and `WireError`."""
    data = _exactly(sock, _PREFIX, until)
    length = int.from_bytes(data, "big")
    if not 0 < length <= MOST_UNKNOWN:
        raise WireError(f"a message of {length} bytes")
    return next(Decoder().feed(data + _exactly(sock, length, until)))


def _exactly(sock: socket.socket, length: int, until: float) -> bytes:
    data = b""
    while len(data) < length:
        # A socket with a time-out of 0 would not block.
        sock.settimeout(max(0.001, until - time.monotonic()))
        if not (part := sock.recv(length - len(data))):
            raise WireError("the connection has ended")
        data += part
    return data
