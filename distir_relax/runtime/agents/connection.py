"""A connection of an agent and its launcher, for one thread that also watches other things."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from distir_relax.runtime.agents.wire import MOST, Decoder, Handshake, Message, WireError, encode

# Bytes that wait to be sent, above which a message is dropped: the other side does not read, and is lost soon.
_MOST_WAITING = 1 << 18
_READ = 1 << 16


class Connection:
    """Messages over a socket that does not block, after a handshake in the role "agent" or "launcher"."""

    def __init__(self, sock: socket.socket, token: bytes, role: str) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._handshake = Handshake(token, role)
        self._decoder = Decoder()
        self._waiting = encode(self._handshake.first())
        self.flush()

    @property
    def is_known(self) -> bool:
        """Whether the other side has proved that it knows the token."""
        return self._handshake.is_done

    def send(self, message: Message) -> None:
        """Send a message as soon as the socket takes it."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting += encode(message)
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        with suppress(BlockingIOError, OSError):
            while self._waiting:
                self._waiting = self._waiting[self.socket.send(self._waiting) :]

    def receive(self) -> Iterator[Message]:
        """Iterate over the messages that have arrived. Raises `WireError` at the end of the connection."""
        while True:
            try:
                data = self.socket.recv(_READ)
            except BlockingIOError:
                return
            except OSError as error:
                raise WireError(str(error)) from None
            if not data:
                raise WireError("the connection has ended")
            for message in self._decoder.feed(data):
                if self.is_known:
                    yield message
                    continue
                if (answer := self._handshake.answer(message)) is not None:
                    self.send(answer)
                if self.is_known:
                    self._decoder.most = MOST

    def close(self) -> None:
        """Close the socket, after up to a tenth of a second for what waits to be sent."""
        until = time.monotonic() + 0.1
        while self._waiting and time.monotonic() < until:
            self.flush()
            time.sleep(0.005)
        self.socket.close()
