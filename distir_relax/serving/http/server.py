"""Running the application with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from distir_relax.errors import RunError

if TYPE_CHECKING:
    from starlette.applications import Starlette

_GRACE = 30
"""Seconds that open requests have to end after a SIGTERM."""


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises `RunError` if it is taken, or not one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"cannot listen at {host}:{port}: {reason}", hint="choose another --port or --host") from None
    return listener


def run_server(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open requests then have 30 seconds to end, until a second SIGINT."""
    import uvicorn

    class Server(uvicorn.Server):
        """A server that hands its signal on when all requests have ended, not in the midst of them."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            numbers = (signal.SIGINT, signal.SIGTERM)
            before = {number: signal.signal(number, self._note) for number in numbers}
            yield
            for number, handler in before.items():
                signal.signal(number, handler)

        def _note(self, number: int, frame: FrameType | None) -> None:
            received.append(number)
            self.handle_exit(number, frame)

    received: list[int] = []
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE, lifespan="on", server_header=False
    )
    logging.getLogger("uvicorn.error").addFilter(_is_other_error)
    Server(config).run(sockets=[listener])
    if received:
        signal.raise_signal(received[0])


def _is_other_error(record: logging.LogRecord) -> bool:
    """Return whether a record is of another error than that a request was cancelled, when the server ends at once."""
    is_cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    # The application reports one of its own as text.
    return not is_cancelled and asyncio.CancelledError.__name__ not in record.getMessage()
