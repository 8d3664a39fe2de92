"""Connections of the launcher and its agents, for one thread that also watches other things."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from distir_relax.runtime.agents.wire import MOST, Decoder, Handshake, Message, WireError, encode

# Bytes that wait to be sent, above which a message is dropped: the other side does not read, and is lost soon.
_MOST_WAITING = 1 << 18
_READ = 1 << 16
# Connections that have not proved that they know the token: their number, and the seconds that each has.
_MOST_UNKNOWN, _UNKNOWN_SECONDS = 64, 5.0
_BACKLOG = 1024


@contextmanager
def in_real_time() -> Iterator[None]:
    """Run this thread before all others while the block runs, where the system allows it (root, CAP_SYS_NICE).

    At a load of 8 on two cores, Linux 6.18 left a thread that sleeps most of the time without a processor for up to ten
    seconds: a watcher would be taken for lost. Processes and threads that this one starts run as usual.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, *before)


class Connection:
    """Messages over a socket that does not block, after a handshake in a role; `introduction` is the first of them."""

    def __init__(self, sock: socket.socket, token: bytes, role: str, introduction: Message | None = None) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._handshake = Handshake(token, role)
        self._decoder = Decoder()
        self._introduction = introduction
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
                    if self._introduction is not None:
                        self.send(self._introduction)

    def close(self) -> None:
        """Close the socket, after up to a tenth of a second for what waits to be sent."""
        until = time.monotonic() + 0.1
        while self._waiting and time.monotonic() < until:
            self.flush()
            time.sleep(0.005)
        self.socket.close()


class Listener:
    """A port at one address, and the `connections` by the number of their host; their sockets are in `selector`.

    Accepted connections have `role`, and introduce themselves with one of the `expected` numbers.
    """

    def __init__(self, address: str, token: bytes, role: str, expected: Collection[int] = ()) -> None:
        self.connections: dict[int, Connection] = {}
        self.expected, self._token, self._role = expected, token, role
        self.selector = selectors.DefaultSelector()
        self._unknown: dict[socket.socket, tuple[Connection, float]] = {}
        self._socket = socket.create_server((address, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()
        self.selector.register(self._socket, selectors.EVENT_READ)

    def connect(self, number: int, address: tuple[str, int], introduction: Message) -> None:
        """Connect to another process's listener, in the role "client"."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(address)
        self.connections[number] = Connection(sock, self._token, "client", introduction)
        self.selector.register(sock, selectors.EVENT_READ)

    def receive(self, ready: socket.socket, now: float) -> Iterator[tuple[int, Message | None]]:
        """Iterate over the messages at a socket, with the number of their host; None is the end of a connection."""
        if ready is self._socket:
            self._accept(now)
            return
        number = next((n for n, connection in self.connections.items() if connection.socket is ready), None)
        if number is None and ready not in self._unknown:
            # Closed since it was ready.
            return
        connection = self._unknown[ready][0] if number is None else self.connections[number]
        try:
            for message in connection.receive():
                if number is None:
                    number = self._introduce(connection, message)
                yield number, message
        except WireError:
            self._drop(ready)
            if number is not None and self.connections.pop(number, None) is not None:
                yield number, None

    def tick(self, now: float) -> None:
        """Send what waits to be sent, and drop connections that have not introduced themselves in time."""
        for connection in self.connections.values():
            connection.flush()
        for sock, (connection, since) in list(self._unknown.items()):
            connection.flush()
            if now > since + _UNKNOWN_SECONDS:
                self._drop(sock)

    def close(self) -> None:
        """Close all sockets."""
        for connection in (*self.connections.values(), *(connection for connection, _ in self._unknown.values())):
            connection.close()
        self._socket.close()
        self.selector.close()

    def _accept(self, now: float) -> None:
        with suppress(OSError):
            sock, _ = self._socket.accept()
            if len(self._unknown) >= _MOST_UNKNOWN:
                # An agent needs a few milliseconds.
                self._drop(next(iter(self._unknown)))
            self._unknown[sock] = Connection(sock, self._token, self._role), now
            self.selector.register(sock, selectors.EVENT_READ)

    def _introduce(self, connection: Connection, message: Message) -> int:
        """Return the number of the host that the other side says it is on. Raises WireError for another message."""
        number = message.get("host")
        if message.get("is") != "here" or type(number) is not int or number not in self.expected:
            raise WireError("not an agent of this launch")
        if number in self.connections:
            # It has lost that connection, and connects again.
            self._drop(self.connections[number].socket)
        del self._unknown[connection.socket]
        self.connections[number] = connection
        return number

    def _drop(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        self._unknown.pop(sock, None)
        sock.close()
