"""Connections to a listening port, each with a thread of its own once it has proved the token."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from distir_relax.runtime.agents.wire import WireError, introduce

# Connections that have not proved the token: another one ends the oldest, since a proof takes milliseconds.
_MOST_UNKNOWN = 64


def admit(listener: socket.socket, token: bytes, role: str, handle: Callable[[socket.socket], None]) -> None:
    """Call `handle` for each connection of a listener that proves the token, until the listener is shut down.

    It runs in threads of their own; `handle` closes the socket.
    """
    threading.Thread(target=_accept, args=(listener, token, role, handle), name="distir-admission", daemon=True).start()


def _accept(listener: socket.socket, token: bytes, role: str, handle: Callable[[socket.socket], None]) -> None:
    unknown: dict[socket.socket, None] = {}

    def introduced(sock: socket.socket) -> None:
        try:
            introduce(sock, token, role)
        except (OSError, WireError):
            sock.close()
            return
        finally:
            unknown.pop(sock, None)
        handle(sock)

    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        for oldest in list(unknown)[: max(0, len(unknown) - _MOST_UNKNOWN + 1)]:
            unknown.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        unknown[sock] = None
        threading.Thread(target=introduced, args=(sock,), name="distir-connection", daemon=True).start()
